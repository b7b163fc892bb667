"""A fixed load that keeps C requests in flight at one server, and what came of it. Its answers are thrown away.

Fixed prompts, greedy, end-of-text ignored, fixed length: the same work every time, so that two runs can be compared.
The first answer of each slot is shortened by its place, so that later ones do not all end in the same moment. The
window starts when the server runs C requests (each has its first token) plus 2 s, and ends before the load does.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.client.chat import ChatClient, ChatOutcome, ChatRequest, OutcomeKind, Sampling
from tasks.client.metrics import read_service_sample
from tasks.records import Server, ServiceSample

ReadService = Callable[[Server], Awaitable[ServiceSample]]
ClientFactory = Callable[[Server, int], Any]

SETTLE_S = 2.0
"""After the last slot's first token, before the window (the averaged power field looks one second back)."""
POLL_S = 0.5
WARM_UP_S = 180.0
"""Patience for the first request: it waited 109 s for kernels to compile on a sound server."""
ANSWER_S = 900.0
"""Deadline of one answer of the load: slow is to be measured, not cut off."""
START_S = 60.0
"""Longest wait for C running requests; a server that never runs so many is measured as it is."""
DRAIN_S = 60.0
STOP_S = 10.0
THINGS = (
    *(
        "a bicycle gear",
        "a tide mill",
        "a suspension bridge",
        "a sundial",
        "a refrigerator",
        "a violin",
        "a canal lock",
    ),
    *("a compass", "a steam engine", "a printing press", "a hot-air balloon", "a telescope", "a pendulum clock"),
    *("a weather vane", "a loom", "a lighthouse", "an abacus", "a water tower", "a pottery kiln", "a sailing boat"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished, cut or aborted request of the probe. Unix seconds."""

    start_s: float
    end_s: float
    tokens: int
    verify_ct: int | None = None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one server did in [start_s, end_s] (Unix time) under `concurrency` requests."""

    server: str
    concurrency: int
    start_s: float
    end_s: float
    answers: tuple[Answer, ...]
    service: tuple[ServiceSample, ...]
    reached: bool
    warm_up_s: float
    failures: Mapping[str, int] = field(default_factory=dict)
    last_failure: str = ""

    @property
    def spans(self) -> list[tuple[float, float]]:
        """The window in three equal parts, for the spread."""
        step = (self.end_s - self.start_s) / 3
        return [(self.start_s + i * step, self.start_s + (i + 1) * step) for i in range(3)]

    def tok_s(self, start_s: float, end_s: float) -> float | None:
        """Output tokens a second in a part of the window: each answer's tokens are spread over its own time."""
        return spread(self.answers, start_s, end_s)

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification step over all answers; None where the server does not count them."""
        counted = [(a.tokens, a.verify_ct) for a in self.answers if a.verify_ct]
        steps = sum(count for _, count in counted if count)
        return sum(tokens for tokens, _ in counted) / steps if steps else None

    def in_flight(self) -> float | None:
        """Mean requests in flight over the window, from the server's own counts."""
        seen = [(s.running or 0) + (s.queued or 0) for s in self.within() if s.running is not None]
        return statistics.fmean(seen) if seen else None

    def within(self) -> list[ServiceSample]:
        """The server's readings inside the window."""
        return [s for s in self.service if self.start_s <= s.time_s <= self.end_s]


def spread(answers: Sequence[Answer], start_s: float, end_s: float) -> float | None:
    """Tokens a second in [start_s, end_s] (Unix seconds), each answer's tokens spread evenly over its own time."""
    if end_s <= start_s or not answers:
        return None
    tokens = 0.0
    for answer in answers:
        shared = min(end_s, answer.end_s) - max(start_s, answer.start_s)
        if shared > 0 and answer.end_s > answer.start_s:
            tokens += answer.tokens * shared / (answer.end_s - answer.start_s)
    return tokens / (end_s - start_s)


def workload_id(output_tokens: int) -> str:
    """Names the fixed load in baseline keys; changes when its prompts or their handling do."""
    return f"probe1-{output_tokens}"


def prompt(slot: int, turn: int) -> str:
    """The fixed text of a slot's n-th request, about 40 tokens; different for each, so that no cache helps."""
    thing = THINGS[(slot * 7 + turn) % len(THINGS)]
    return (
        f"Notebook {slot}, page {turn}. Explain how {thing} works, part by part, to somebody who has never seen one. "
        "Then describe how to build a small one at home."
    )


def client_for(server: Server, limit: int) -> ChatClient:
    """The client that generation uses."""
    return ChatClient(server, limit)


@dataclass(slots=True)
class Load:
    """Mutable state of a running load; lives in one event loop."""

    server: Server
    client: Any
    output_tokens: int
    answers: list[Answer] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    last_failure: str = ""
    open: set[str] = field(default_factory=set)
    stopping: bool = False
    warm_up_s: float = 0.0

    async def slot(self, index: int, of: int) -> None:
        """Keep one request in flight until told to stop."""
        turn = 0
        while not self.stopping:
            share = (index + 1) / of if turn == 0 else 1.0
            await self.send(index, turn, max(8, round(self.output_tokens * share)))
            turn += 1

    async def send(self, index: int, turn: int, tokens: int, deadline_s: float = ANSWER_S) -> ChatOutcome:
        """One request; its tokens are kept, a failure is counted."""
        name = f"probe-{index}-{turn}-{time.time_ns()}"
        request = ChatRequest(
            request_id=name,
            messages=[{"role": "user", "content": prompt(index, turn)}],
            sampling=Sampling(temperature=0.0, max_tokens=tokens),
            ignore_eos=True,
        )
        self.open.add(name)
        start_s = time.time()
        try:
            outcome: ChatOutcome = await self.client.send(request, deadline_s)
        finally:
            self.open.discard(name)
        if outcome.kind in (OutcomeKind.OK, OutcomeKind.CUT, OutcomeKind.ABORTED) and outcome.completion_tokens:
            # Acceptance is taken from whole answers: what an aborted one reports need not belong together.
            steps = None if outcome.kind is OutcomeKind.ABORTED else outcome.verify_ct
            self.answers.append(Answer(start_s, time.time(), outcome.completion_tokens, steps))
        elif not self.stopping:
            self.failures[outcome.kind.value] = self.failures.get(outcome.kind.value, 0) + 1
            self.last_failure = outcome.message
            await asyncio.sleep(0.5)
        return outcome

    async def stop(self, slots: Sequence["asyncio.Task[None]"]) -> None:
        """Abort what is in flight where the server can (it then tells how far each came); else let it finish."""
        self.stopping = True
        waited_s = 0.0
        while waited_s < (STOP_S if self.server.capabilities.abort else DRAIN_S) and not all(t.done() for t in slots):
            if self.server.capabilities.abort:
                # Again each second: a request that was still on its way is not known to the server the first time.
                await asyncio.gather(*(self.client.abort(name) for name in list(self.open)))
            await asyncio.wait(slots, timeout=1.0)
            waited_s += 1.0
        for task in slots:
            task.cancel()
        await asyncio.gather(*slots, return_exceptions=True)


@asynccontextmanager
async def loading(
    server: Server, concurrency: int, output_tokens: int, client_factory: ClientFactory = client_for
) -> AsyncIterator[Load]:
    """Warm the server up, then keep `concurrency` fixed requests in flight inside the block."""
    async with client_factory(server, concurrency) as client:
        load = Load(server, client, output_tokens)
        began_s = time.time()
        await load.send(0, 0, 8, WARM_UP_S)
        load.warm_up_s = time.time() - began_s
        load.answers.clear()
        slots = [asyncio.create_task(load.slot(index, concurrency)) for index in range(concurrency)]
        try:
            yield load
        finally:
            await load.stop(slots)


async def run_probe(
    server: Server,
    concurrency: int,
    *,
    seconds: float,
    output_tokens: int = 512,
    start_timeout_s: float | None = None,
    read_service: ReadService = read_service_sample,
    client_factory: ClientFactory = client_for,
) -> ProbeResult:
    """Load `server` with `concurrency` fixed requests for one window of `seconds`. Never raises for a sick server."""
    samples: list[ServiceSample] = []
    # Watching starts before the first request: a server that hangs on it shows here.
    poller = asyncio.create_task(_poll(server, read_service, samples))
    try:
        async with loading(server, concurrency, output_tokens, client_factory) as load:
            patience_s = START_S if start_timeout_s is None else start_timeout_s
            reached = await _all_running(concurrency, samples, load, patience_s)
            await asyncio.sleep(SETTLE_S)
            start_s = time.time()
            await asyncio.sleep(seconds)
            end_s = time.time()
    finally:
        poller.cancel()
        await asyncio.gather(poller, return_exceptions=True)
    return ProbeResult(
        server=server.name,
        concurrency=concurrency,
        start_s=start_s,
        end_s=end_s,
        answers=tuple(load.answers),
        service=tuple(samples),
        reached=reached,
        warm_up_s=load.warm_up_s,
        failures=dict(load.failures),
        last_failure=load.last_failure,
    )


async def _poll(server: Server, read_service: ReadService, into: list[ServiceSample]) -> None:
    while True:
        sample = await read_service(server)
        # Stamped here, in the clock of the power readings: windows of both are cut together.
        into.append(replace(sample, time_s=time.time()))
        await asyncio.sleep(POLL_S)


async def _all_running(concurrency: int, samples: Sequence[ServiceSample], load: Load, timeout_s: float) -> bool:
    """Wait until every slot has a first token; without counts, until some answers are back."""
    until_s = time.time() + timeout_s
    while time.time() < until_s:
        counts = [sample.running for sample in samples if sample.running is not None]
        if counts and counts[-1] >= concurrency:
            return True
        if not counts and len(load.answers) >= min(concurrency, 4):
            return True
        await asyncio.sleep(0.1)
    return False
