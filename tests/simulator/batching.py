"""Continuous batching as processor sharing: exact event times, no ticks, KV limit with retraction, a FIFO queue."""

import asyncio
import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from simulator.settings import SimSettings


@dataclass(slots=True, order=True)
class Work:
    """One request inside a server. `target` is the shared progress at which it ends; `left` survives a retraction."""

    target: float
    rid: str = field(compare=False)
    prompt_tokens: int = field(compare=False)
    left: float = field(compare=False)
    done: "asyncio.Future[str]" = field(compare=False)
    began: float = field(compare=False, default=0.0)
    dropped: bool = field(compare=False, default=False)


class Batch:
    """Progress S is the tokens every running request has gained since the start; a request admitted at S0 with n
    tokens to make ends when S reaches S0 + n. Only admissions, ends and KV overflow change the rate.
    """

    def __init__(self, settings: SimSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.settings, self._loop = settings, loop
        self.slow_factor, self.frozen = 1.0, False
        self.generated = self.prompt_total = 0.0
        self.retracted = 0
        self.busy_slot_s = 0.0
        self._running: list[Work] = []
        self._queue: deque[Work] = deque()
        self._progress, self._at = 0.0, loop.time()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def _rate(self) -> float:
        """Tokens a second of each running request."""
        if self.frozen or not self._running:
            return 0.0
        settings = self.settings
        return settings.total_tok_s(self.running) / self.running * settings.speedup / self.slow_factor

    def kv_used(self) -> float:
        return sum(w.prompt_tokens + w.began + (self._progress - (w.target - w.left)) for w in self._running)

    def _advance(self) -> None:
        now = self._loop.time()
        gained = self._rate() * (now - self._at)
        self.busy_slot_s += self.running * (now - self._at)
        self.generated += gained * self.running
        self._progress += gained
        self._at = now

    def submit(self, rid: str, prompt_tokens: int, tokens: int) -> Work:
        """Queue a request; its `done` resolves to `stop`, `abort` or raises when the server dies."""
        self._advance()
        work = Work(0.0, rid, prompt_tokens, float(tokens), self._loop.create_future())
        work.left += prompt_tokens * self.settings.prefill_weight
        self._queue.append(work)
        self.prompt_total += prompt_tokens
        self._settle()
        return work

    def drop(self, rid: str, result: str = "abort") -> float | None:
        """End a request early; returns the tokens it still had to make, None when it is not here."""
        self._advance()
        for work in (*self._running, *self._queue):
            if work.rid == rid and not work.dropped:
                left = work.target - self._progress if work in self._running else work.left
                self._remove(work, result)
                self._settle()
                return max(0.0, left)
        return None

    def _remove(self, work: Work, result: str) -> None:
        work.dropped = True
        if work in self._running:
            self._running.remove(work)
            heapq.heapify(self._running)
        else:
            self._queue.remove(work)
        if not work.done.done():
            work.done.set_result(result)

    def kill(self, error: Exception) -> None:
        """The scheduler dies: everything inside fails."""
        self._advance()
        for work in (*self._running, *self._queue):
            if not work.done.done():
                work.done.set_exception(error)
                work.done.exception()
        self._running.clear()
        self._queue.clear()
        self._settle()

    def change(self, *, frozen: bool | None = None, slow_factor: float | None = None) -> None:
        """Freeze, thaw or slow down from now on."""
        self._advance()
        self.frozen = self.frozen if frozen is None else frozen
        self.slow_factor = slow_factor or self.slow_factor
        self._settle()

    def _settle(self) -> None:
        """Finish what is due, admit what fits, retract what does not, set the next timer."""
        while self._running and not self.frozen and self._running[0].target <= self._progress + 1e-6:
            work = heapq.heappop(self._running)
            if not work.done.done():
                work.done.set_result("stop")
        self._retract()
        while self._queue and self.running < self.settings.max_running and not self.frozen:
            head = self._queue[0]
            if self._running and self.kv_used() + head.prompt_tokens > self.settings.kv_tokens * 0.98:
                break
            work = self._queue.popleft()
            work.target = self._progress + work.left
            heapq.heappush(self._running, work)
        self._set_timer()

    def _retract(self) -> None:
        while self.running > 1 and self.kv_used() > self.settings.kv_tokens:
            work = max(self._running, key=lambda w: w.target)
            self._running.remove(work)
            heapq.heapify(self._running)
            gained = work.left - (work.target - self._progress)
            work.began += gained
            work.left -= gained
            self._queue.appendleft(work)
            self.retracted += 1

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        rate = self._rate()
        if rate <= 0:
            return
        gain = self._running[0].target - self._progress
        if math.isfinite(self.settings.kv_tokens):
            room = self.settings.kv_tokens - self.kv_used()
            gain = min(gain, max(1.0, room / self.running))
        self._timer = self._loop.call_later(max(0.0, gain / rate), self._wake)

    def _wake(self) -> None:
        self._advance()
        self._settle()
