"""Is a server alive? Readings, ejection of what stands still, probes, rejoin with a warm-up ramp."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from tasks.client.chat import ChatRequest, OutcomeKind, Sampling
from tasks.client.metrics import read_service_sample
from tasks.client.transport import open_session
from tasks.generation.line import Line, State
from tasks.generation.settings import GenerationSettings
from tasks.records import ServiceSample

log = logging.getLogger(__name__)
REACH_S = 5.0
BAD_IN_A_ROW = 8  # answers that were none, without a good one between
TIMEOUTS_IN_A_ROW = 3
MISSES = 3
MOST_PROBE_WAIT_S = 60.0


class Health:
    """Looks after the lines of one engine, in its loop. `pump` is called when slots may have become free."""

    def __init__(self, settings: GenerationSettings, pump: Callable[[], None]) -> None:
        self._settings, self._pump = settings, pump
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, line: Line) -> None:
        """Start reading this line's counters."""
        self._sessions[line.server.name] = open_session(line.server.base_url, line.server.api_key)
        line.progress_s = time.monotonic()
        self._spawn(self._sample(line))

    def session(self, line: Line) -> aiohttp.ClientSession:
        """The connection its counters are read over."""
        return self._sessions[line.server.name]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop watching."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in self._sessions.values():
            await session.close()

    async def _sample(self, line: Line) -> None:
        misses = 0
        session = self._sessions[line.server.name]
        while line.state is not State.GONE:
            await asyncio.sleep(self._settings.sample_s)
            if line.state is not State.UP:
                misses = 0
                continue
            sample = await read_service_sample(line.server, session, REACH_S)
            misses = 0 if sample.alive else misses + 1
            if line.state is not State.UP:
                continue
            if misses >= MISSES:
                self.eject(line, f"its counters could not be read {misses} times in a row")
            else:
                self._judge(line, sample)

    def _judge(self, line: Line, sample: ServiceSample) -> None:
        line.sample = sample
        if not line.watching:
            line.controller.observe(sample)
        now = time.monotonic()
        tokens = sample.generated_tokens_total
        idle = not sample.running and not line.flights
        if tokens is None or tokens != line.tokens_seen or idle:
            line.progress_s = now
        line.tokens_seen = -1.0 if tokens is None else tokens
        age = sample.heartbeat_age_s
        if age is not None and age > self._settings.stall_s:
            self.eject(line, f"its scheduler's heartbeat is {age:.0f} s old")
        elif now - line.progress_s > self._settings.stall_s:
            self.eject(line, f"no token for {now - line.progress_s:.0f} s with {len(line.flights)} requests in flight")
        self._pump()

    def seen(self, line: Line, kind: OutcomeKind) -> None:
        """Count endings: a server that only fails would attract every request, being the least loaded."""
        if kind in (OutcomeKind.OK, OutcomeKind.CUT):
            line.bad_in_a_row = line.timeouts_in_a_row = line.ejections = 0
        elif kind is OutcomeKind.TIMEOUT:
            line.timeouts_in_a_row += 1
            if line.timeouts_in_a_row >= TIMEOUTS_IN_A_ROW:
                self.eject(line, f"{line.timeouts_in_a_row} requests in a row passed their deadline")
        elif kind in (OutcomeKind.SERVER_ERROR, OutcomeKind.MALFORMED, OutcomeKind.ABORTED, OutcomeKind.CONNECTION):
            line.bad_in_a_row += 1
            if line.bad_in_a_row >= max(BAD_IN_A_ROW, line.controller.target // 4):
                self.eject(line, f"{line.bad_in_a_row} requests in a row ended in {kind.value}")

    async def suspect(self, line: Line) -> bool:
        """After a broken connection: is the server gone? One probe at a time; nothing is sent meanwhile."""
        if line.state is State.DOWN or line.state is State.GONE:
            return True
        if line.suspicion is None:
            line.state = State.SUSPECT
            line.suspicion = asyncio.get_running_loop().create_future()
            self._spawn(self._clear_up(line))
        return await asyncio.shield(line.suspicion)

    async def _clear_up(self, line: Line) -> None:
        alive = await self._reachable(line)
        suspicion, line.suspicion = line.suspicion, None
        if line.state is State.SUSPECT:
            line.state = State.UP
            if not alive:
                self.eject(line, "a connection broke and it does not answer")
        if suspicion is not None and not suspicion.done():
            suspicion.set_result(line.state in (State.DOWN, State.GONE))
        self._pump()

    async def _reachable(self, line: Line) -> bool:
        session = self._sessions[line.server.name]
        try:
            async with session.get("/v1/models", timeout=aiohttp.ClientTimeout(total=REACH_S)) as answer:
                await answer.read()
                return answer.status < 500
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def eject(self, line: Line, reason: str) -> None:
        """Send nothing more; what it holds goes to other servers; probe until it answers again."""
        if line.state in (State.DOWN, State.GONE):
            return
        line.state, line.reason = State.DOWN, reason
        line.ejections += 1
        log.warning("server %s ejected: %s; %d requests go elsewhere", line.server.name, reason, len(line.flights))
        held = list(line.flights.values())
        for flight in held:
            flight.fate = flight.fate or "requeue"
            if flight.task is not None:
                flight.task.cancel()
        self._spawn(self._abort(line, [flight.request_id for flight in held]))
        self._spawn(self._probe(line))
        self._pump()

    async def _abort(self, line: Line, request_ids: list[str]) -> None:
        """Best effort: a server that only seemed dead should not go on with work that was moved."""
        for request_id in request_ids:
            if line.state is not State.DOWN or not await self._reachable(line):
                return
            await line.client.abort(request_id)

    async def _probe(self, line: Line) -> None:
        wait = self._settings.probe_s
        while line.state is State.DOWN:
            await asyncio.sleep(wait)
            wait = min(MOST_PROBE_WAIT_S, wait * (1.5 if line.ejections < 3 else 2.0))
            if line.state is State.DOWN and await self._reachable(line) and await self._generates(line):
                self.rejoin(line)

    async def _generates(self, line: Line) -> bool:
        """One token, sampled: a wedged server answers everything but this."""
        messages = [{"role": "user", "content": "Say hello."}]
        probe = ChatRequest("probe" + "0" * 27, messages, Sampling(1.0, max_tokens=1), prompt_ids=None)
        with contextlib.suppress(asyncio.TimeoutError):
            outcome = await line.client.send(probe, self._settings.stall_s)
            return outcome.kind in (OutcomeKind.OK, OutcomeKind.CUT)
        return False

    def rejoin(self, line: Line) -> None:
        """Send again, ramping up."""
        if line.state is not State.DOWN:
            return
        now = time.monotonic()
        line.state, line.reason = State.UP, ""
        line.bad_in_a_row = line.timeouts_in_a_row = 0
        line.ramp_from_s = line.progress_s = now
        log.info("server %s is back", line.server.name)
        self._pump()
