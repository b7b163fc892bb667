"""The engine's loop: dispatch, settle, feed. Everything here runs in one thread; the facade is engine.py."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from tasks.client.chat import ChatClient, ChatOutcome, OutcomeKind
from tasks.errors import GateError, ServerError
from tasks.generation.asking import Asker, DoesNotFit, Question
from tasks.generation.breaker import Breaker
from tasks.generation.controller import LimitController
from tasks.generation.feeder import Feeder
from tasks.generation.health import Health
from tasks.generation.jobs import Job, Pool
from tasks.generation.lengths import Lengths, Meter, TokenClock
from tasks.generation.line import Flight, Line, State, least_loaded
from tasks.generation.policy import Action, Do, after_failure
from tasks.generation.quality import Judge
from tasks.generation.reasons import Reason
from tasks.generation.settings import GenerationSettings
from tasks.generation.settle import Settler
from tasks.records import Server
from tasks.settings import SamplingSettings

log = logging.getLogger(__name__)
TICK_S = 0.05
LAST_ANSWERS_S = 1.5


class Core:
    """One pool for the run; requests go to the least-loaded live server the moment a slot is free."""

    def __init__(
        self,
        feeder: Feeder,
        target: Any,
        sampling: SamplingSettings,
        settings: GenerationSettings,
        fail: Callable[[Exception], None],
    ) -> None:
        self.settings, self.feeder, self.fail = settings, feeder, fail
        self.pool = Pool()
        self.lines: dict[str, Line] = {}
        self.health = Health(settings, self.pump)
        self.breaker = Breaker(settings.breaker)
        self.lengths, self.meter, self.tokens = Lengths(), Meter(), TokenClock()
        self.asker = Asker(target, sampling, settings)
        judge = Judge(target, drop_repetition=settings.drop_repetition)
        self.settler = Settler(settings, judge, feeder, self.pool, self.breaker, self.lengths, self.meter)
        self.paused = self.stopping = False
        self.starved_s = 0.0
        self._starved_since: float | None = None
        self._down_since: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- servers

    async def add(self, server: Server, limit: int) -> None:
        """Start sending to a server (again)."""
        old = self.lines.get(server.name)
        if old is not None and old.state is not State.GONE:
            self.health.rejoin(old)
            return
        if old is not None:
            await old.client.__aexit__(None, None, None)
            await self.health.session(old).close()
        client = ChatClient(server, limit, self.settings.client)
        await client.__aenter__()
        line = Line(server, client, LimitController(max(1, limit)), self.settings.ramp_s, time.monotonic())
        self.lines[server.name] = line
        self.health.watch(line)
        self.pump()

    async def remove(self, name: str) -> None:
        """Stop sending; what it holds goes elsewhere."""
        line = self.lines.get(name)
        if line is not None:
            self.health.eject(line, "removed")
            line.state = State.GONE

    def set_limit(self, name: str, limit: int) -> None:
        """Requests in flight wanted at one server from now on; no ramp (calibration measures what it asked for)."""
        line = self.lines[name]
        line.client.grow(limit)
        line.controller.set_target(limit)
        line.ramp_from_s = float("-inf")
        self.pump()

    @property
    def capacity(self) -> int:
        """Requests in flight wanted over all servers."""
        return sum(line.controller.target for line in self.lines.values() if line.state is not State.GONE)

    @property
    def in_flight(self) -> int:
        """Requests in flight now."""
        return sum(len(line.flights) for line in self.lines.values())

    # ---- dispatch

    def pump(self) -> None:
        """Fill every free slot. Cheap when there is nothing to do; called at each event."""
        if self.paused or self.stopping:
            return
        now = time.monotonic()
        lines = list(self.lines.values())
        while (line := least_loaded(lines, now)) is not None:
            job = self.pool.take(now)
            if job is None:
                self._starved_since = self._starved_since or now
                break
            self._start(job, line, now)
        else:
            self._note_fed(now)
        self.feeder.hungry(self.pool.waiting_new < max(64, self.capacity))

    def _note_fed(self, now: float) -> None:
        if self._starved_since is not None:
            self.starved_s += now - self._starved_since
            self._starved_since = None

    def starved_total_s(self) -> float:
        """Seconds in which a slot was free and nothing was there to send."""
        since = self._starved_since
        return self.starved_s + (time.monotonic() - since if since is not None else 0.0)

    def _start(self, job: Job, line: Line, now: float) -> None:
        key = f"{job.chunk}/{job.row}"
        flight = Flight(job, "", now)
        line.flights[key] = flight
        self.tokens.begin(line.server.name, key, now)
        flight.task = asyncio.get_running_loop().create_task(self._serve(job, line, flight, key))
        self._tasks.add(flight.task)
        flight.task.add_done_callback(lambda task: self._ended(task, line, flight, key))

    def _ended(self, task: "asyncio.Task[None]", line: Line, flight: Flight, key: str) -> None:
        """Also for a task that was cancelled before its first step: its job must not be lost with it."""
        self._tasks.discard(task)
        if line.flights.get(key) is not flight:
            return
        self._left(line, key, 0)
        if flight.fate == "requeue":
            flight.job.requeues += 1
            self.pool.put_back(flight.job)
            self.pump()

    async def _serve(self, job: Job, line: Line, flight: Flight, key: str) -> None:
        try:
            asked = await self._send(job, line, flight)
        except Exception as error:
            self._left(line, key, 0)
            self.pool.put_back(job)
            self.fail(error)
            return
        self._left(line, key, asked[1].completion_tokens or 0)
        self.pump()  # the slot is filled again before this answer is looked at
        try:
            await self._settle(job, line, *asked)
        except Exception as error:
            self.pool.put_back(job)
            self.fail(error)
        self.pump()

    def _left(self, line: Line, key: str, tokens: int) -> None:
        line.flights.pop(key, None)
        self.tokens.end(line.server.name, key, tokens, time.monotonic())

    async def _send(self, job: Job, line: Line, flight: Flight) -> tuple[Question | None, ChatOutcome]:
        try:
            question = await self.asker.ask(job, line.server)
        except DoesNotFit as error:
            return None, ChatOutcome(OutcomeKind.OVERFLOW, message=str(error))
        except ValueError as error:
            return None, ChatOutcome(OutcomeKind.BAD_REQUEST, message=str(error), finish_reason=Reason.BAD_PROMPT)
        flight.request_id = question.request.request_id
        outcome = await line.client.send(question.request, question.deadline_s)
        if outcome.kind is OutcomeKind.TIMEOUT:  # a client that leaves does not stop the server's work
            await line.client.abort(flight.request_id)
        return question, outcome

    async def _settle(self, job: Job, line: Line, question: Question | None, outcome: ChatOutcome) -> None:
        if self.stopping and outcome.kind is not OutcomeKind.OK:
            return  # aborted by our own stop: it stays pending
        job.attempts_total += 1
        if question is None:
            reason = Reason(outcome.finish_reason) if outcome.finish_reason else Reason.CONTEXT_OVERFLOW
            report = self.settler.give_up(job, line.server.name, Action(Do.FAIL, reason), outcome.message, None)
        elif outcome.kind in (OutcomeKind.OK, OutcomeKind.CUT):
            self.health.seen(line, outcome.kind)
            report = self.settler.answered(job, line.server, question, outcome)
        else:
            down = await self._broken(line, outcome)
            attempt = job.attempt - job.first_attempt
            action = after_failure(
                outcome, attempt=attempt, requeues=job.requeues, server_down=down, settings=self.settings
            )
            report = self.settler.unanswered(job, line.server.name, question, outcome, action)
        if report is not None and report.stops:
            self.fail(GateError(f"generation stopped: {report.summary}", report.as_dict()))

    async def _broken(self, line: Line, outcome: ChatOutcome) -> bool:
        """Tell the line's health; whether the server is (found to be) down."""
        if outcome.kind is OutcomeKind.RETRY_LATER:
            wait = outcome.retry_after_s or self.settings.retry_base_s
            line.hold_until_s = max(line.hold_until_s, time.monotonic() + min(wait, self.settings.retry_most_s))
            line.controller.refused(len(line.flights))
            return False
        down = outcome.kind is OutcomeKind.CONNECTION and await self.health.suspect(line)
        if not down:
            self.health.seen(line, outcome.kind)
        return down

    # ---- the loop's own tasks

    async def tick(self) -> None:
        """Ramps, delayed jobs and servers that stay away."""
        while not self.stopping:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            ready = self.pool.next_ready_s()
            if (ready is not None and ready <= now) or any(line.ramping(now) for line in self.lines.values()):
                self.pump()
            self._check_servers(now)

    def _check_servers(self, now: float) -> None:
        if any(line.state in (State.UP, State.SUSPECT) for line in self.lines.values()):
            self._down_since = None
            return
        self._down_since = self._down_since or now
        if now - self._down_since > self.settings.no_server_s:
            self._down_since = now
            reasons = "; ".join(f"{n}: {line.reason}" for n, line in self.lines.items()) or "none was given"
            self.fail(ServerError(f"no live server for {self.settings.no_server_s:g} s ({reasons}); start one, resume"))

    async def shut(self, abort_s: float) -> None:
        """Stop dispatch, abort what is in flight (it stays pending), wait for the tasks, close the clients."""
        self.stopping = True
        self.pool.clear()
        flights = [(line, flight) for line in self.lines.values() for flight in line.flights.values()]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._abort_all(flights), abort_s)
        if self._tasks:  # aborted requests answer at once, and what was finished just now is kept
            await asyncio.wait(list(self._tasks), timeout=min(LAST_ANSWERS_S, abort_s))
        for _, flight in flights:
            flight.fate = "drop"
            if flight.task is not None:
                flight.task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.health.close()
        for line in self.lines.values():
            await line.client.__aexit__(None, None, None)

    async def _abort_all(self, flights: Sequence[tuple[Line, Flight]]) -> None:
        gate = asyncio.Semaphore(64)

        async def one(line: Line, flight: Flight) -> None:
            async with gate:
                if flight.request_id and line.state is State.UP:
                    await line.client.abort(flight.request_id)

        await asyncio.gather(*(one(line, flight) for line, flight in flights))
