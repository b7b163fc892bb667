"""Steady windows for calibration: throughput of one server at the limit it was given."""

import asyncio
import time
from dataclasses import dataclass

from tasks.client.metrics import read_service_sample
from tasks.generation.core import Core
from tasks.generation.line import Line
from tasks.records import LoadWindow, ServiceSample

READ_S = 0.5
FILLED = 0.95  # of the limit in flight counts as steady
STARVED_SHARE = 0.1  # of the window with fewer in flight makes it worthless
STEADY = 0.04  # relative difference of the two halves at which a window may end early


@dataclass(frozen=True, slots=True)
class Point:
    """One reading inside a window."""

    time_s: float
    in_flight: int
    tokens: float
    sample: ServiceSample


class Windows:
    """Measures inside the engine's loop. One window a server at a time."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def measure(self, server: str, min_s: float, max_s: float) -> LoadWindow:
        """Wait until the limit is filled and things have settled, then measure between `min_s` and `max_s` seconds.

        Tokens come from the server's live counter; servers without one are read from their answers, each spread over
        its own duration. `starved` is set when the pool could not keep the limit filled.
        """
        line = self._core.lines[server]
        line.watching += 1
        try:
            self._core.pump()
            await self._fill(line, max_s)
            await asyncio.sleep(min(min_s / 4, 10.0))
            points = [await self._read(line)]
            while not _enough(points, min_s, max_s):
                await asyncio.sleep(min(READ_S, min_s / 8))
                points.append(await self._read(line))
        finally:
            line.watching -= 1
        return _window(line, points)

    async def _fill(self, line: Line, most_s: float) -> None:
        until = time.monotonic() + most_s
        while len(line.flights) < FILLED * line.controller.target and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(min(0.1, most_s / 50))

    async def _read(self, line: Line) -> Point:
        session = self._core.health.session(line)
        sample = await read_service_sample(line.server, session)
        now = time.monotonic()
        live = sample.generated_tokens_total if line.server.engine == "sglang" else None
        tokens = self._core.tokens.total(line.server.name, now) if live is None else live
        return Point(now, len(line.flights), tokens, sample)


def _enough(points: list[Point], min_s: float, max_s: float) -> bool:
    passed = points[-1].time_s - points[0].time_s
    if passed < min_s or len(points) < 5:
        return False
    if passed >= max_s:
        return True
    if points[-1].tokens <= points[0].tokens:
        return False  # counted at the end of answers, and none ended yet: nothing is steady
    middle = points[len(points) // 2]
    first, second = _rate(points[0], middle), _rate(middle, points[-1])
    return abs(first - second) <= STEADY * max(first, second, 1e-9)


def _rate(first: Point, last: Point) -> float:
    return (last.tokens - first.tokens) / max(1e-9, last.time_s - first.time_s)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _window(line: Line, points: list[Point]) -> LoadWindow:
    first, last, limit = points[0], points[-1], line.controller.target
    samples = [point.sample for point in points]
    in_flight = [float(point.in_flight) for point in points]
    running = _mean([float(s.running) for s in samples if s.running is not None])
    before, after = first.sample.retracted_total, last.sample.retracted_total
    short = sum(point.in_flight < 0.9 * limit for point in points)
    return LoadWindow(
        line.server.name,
        limit,
        last.time_s - first.time_s,
        max(0.0, last.tokens - first.tokens),
        running if running is not None else _mean(in_flight) or 0.0,
        _mean([float(s.queued) for s in samples if s.queued is not None]) or 0.0,
        max((s.kv_usage for s in samples if s.kv_usage is not None), default=None),
        after - before if before is not None and after is not None else 0.0,
        _mean([s.accept_length for s in samples if s.accept_length is not None]),
        starved=short > STARVED_SHARE * len(points),
    )
