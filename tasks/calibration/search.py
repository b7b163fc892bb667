"""How many requests in flight? A pure state machine over measured windows of one server: no clock, no I/O.

Ramp     double from a pessimistic start while throughput gains. Where the gain ends abruptly rather than by levelling
         off, the middle of the last doubling is measured (a maximum?), then one level beyond (curves have dips, a batch
         without a captured graph, behind which they rise). A queue, rising retractions or a full KV pool end it.
Refine   see refine.py: what the server really ran, a maximum between doublings, the smallest concurrency that should
         be within `tolerance` of the peak. Highest first: going down means waiting for answers to end.
Confirm  measure the choice longer while its noise is above the tolerance.

Each level is measured in two halves: their difference tells the noise, without which no two levels can be compared.

The next step is a function of the windows seen so far, so that a recorded calibration can be replayed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.calibration import refine, smooth
from tasks.calibration.levels import LevelStats, noise, summarize, usable
from tasks.calibration.settings import CalibrationSettings
from tasks.records import LoadWindow

LEVELLING = 0.35
"""A saturating curve's gain shrinks by 0.5 to 0.8 a doubling; below this share of the last gain it broke off."""

MAX_REFINEMENTS = 5
NOISY = 0.04
NOISY_REFINEMENTS = 2
"""Half windows noisier than NOISY cannot tell neighbouring levels apart; time is better spent on repeats."""

MAX_CONFIRMATIONS = 4
"""Windows spent on measuring choices longer."""

CONFIDENT = 0.6
"""The choice's relative standard error may be this share of the tolerance."""

MOST_WINDOWS = 60
"""A search takes 10 to 25; a driver that never measures what it was asked for must not keep one for ever."""

MAX_UNUSABLE = 2
"""Windows at one level that may fail to become steady before the search gives up on going higher."""


@dataclass(frozen=True, slots=True)
class Step:
    """Measure one window of at least `min_s` seconds at `concurrency`."""

    concurrency: int
    min_s: float
    phase: str


class Search:
    """Drives one server: `next()` says what to measure, `observe()` takes the window, `choice` is the answer.

    `capacity`: requests that the server says it runs at once; the search never goes beyond it.
    """

    def __init__(self, settings: CalibrationSettings, capacity: int | None = None) -> None:
        self._settings = settings
        self._top = max(1, min(settings.limit, capacity or settings.limit))
        self._start = min(settings.start, self._top)
        self._windows: list[LoadWindow] = []
        self._stopped = ""
        self._starved = False
        self._levelled = False
        self._ended = False
        self._asked: Step | None = None

    @property
    def windows(self) -> Sequence[LoadWindow]:
        """Everything observed, in order."""
        return tuple(self._windows)

    @property
    def levels(self) -> dict[int, LevelStats]:
        """Means by concurrency, ascending."""
        return summarize(self._windows)

    @property
    def stopped_because(self) -> str:
        """Why the ramp ended, and whether work ran short; empty while it goes on."""
        short = f"work ran short at {self._windows[-1].concurrency} in flight" if self._starved else ""
        return "; ".join(part for part in (self._stopped, short) if part)

    @property
    def choice(self) -> int:
        """Smallest fitting concurrency within `tolerance` of the best; the start value when nothing was measured."""
        levels = self._fitting()
        if not levels:
            return min(self.levels, default=self._start)
        target = self._target(levels)
        reached = [c for c, stats in levels.items() if stats.tok_s >= target]
        return min(reached, default=max(levels, key=lambda c: levels[c].tok_s))

    @property
    def tok_s(self) -> float:
        """Throughput measured at the choice; 0 when nothing was."""
        stats = self.levels.get(self.choice)
        return stats.tok_s if stats else 0.0

    def observe(self, window: LoadWindow) -> None:
        """Take one window; its `concurrency` says which level it belongs to, whatever was asked for."""
        self._windows.append(window)
        self._starved = self._starved or window.starved
        if self._asked is not None and window.concurrency < self._asked.concurrency:
            self._stopped = self._stopped or (
                f"the engine backed off from {self._asked.concurrency} to {window.concurrency} in flight"
            )

    def finish(self, reason: str) -> None:
        """End the search from outside, for example because too few prompts are left."""
        self._stopped = "; ".join(part for part in (self._stopped, reason) if part)
        self._ended = True

    def next(self) -> Step | None:
        """What to measure next; None when the choice stands."""
        if self._starved or self._ended or len(self._windows) >= MOST_WINDOWS:
            return None
        self._asked = self._decide()
        return self._asked

    def _decide(self) -> Step | None:
        if self._windows and not usable(self._windows[-1]):
            return self._unusable()
        if self._windows and (half := self._other_half()) is not None:
            return half
        step = None if self._stopped else self._ramp()
        return step or self._refine() or self._confirm()

    def _other_half(self) -> Step | None:
        level = self._windows[-1].concurrency
        measured = self.levels[level].seconds
        return None if measured >= 0.99 * self._settings.window_s else Step(level, self._half_s, "half")

    @property
    def _half_s(self) -> float:
        return self._settings.window_s / 2

    @property
    def _noise(self) -> float:
        """Relative sd of one half window."""
        return noise(self._windows, self._half_s)

    def _smooth(self, levels: dict[int, LevelStats]) -> tuple[dict[int, LevelStats], smooth.Saturation | None]:
        return smooth.smoothed(levels, self._noise, self._half_s)

    def _unusable(self) -> Step | None:
        level = self._windows[-1].concurrency
        failed = sum(1 for w in self._windows if w.concurrency == level and not usable(w))
        if failed < MAX_UNUSABLE:
            return Step(level, self._half_s, "again")
        self._stopped = self._stopped or f"no steady window at {level} in flight"
        return None

    def _ramp(self) -> Step | None:
        levels, level, flat, last_gain = self._smooth(self.levels)[0], self._start, 0, math.inf
        best = previous = None
        while True:
            stats = levels.get(level)
            if stats is None:
                return Step(level, self._half_s, "ramp")
            if reason := overload(stats, previous):
                return self._stop(reason)
            if best is not None and previous is not None:
                gain = stats.tok_s / best.tok_s - 1
                flat = flat + 1 if gain < self._settings.min_gain else 0
                if flat:
                    step = self._at_gain_end(levels, previous, stats, gain, last_gain, flat)
                    if step or self._stopped:
                        return step
                last_gain = gain
            if level >= self._top:
                return self._stop(f"reached the most allowed, {self._top}")
            best = stats if best is None or stats.tok_s > best.tok_s else best
            previous, level = stats, min(2 * level, self._top)

    def _at_gain_end(
        self, levels: dict[int, LevelStats], low: LevelStats, high: LevelStats, gain: float, last_gain: float, flat: int
    ) -> Step | None:
        """Levelled off: stop. Broke off: look between the two levels, then beyond."""
        text = f"less than {self._settings.min_gain:.0%} gained beyond {high.concurrency // 2**flat} in flight"
        sd = self._noise  # of the difference of two levels, each measured for two halves
        usual = 0.0 if math.isinf(last_gain) else LEVELLING * last_gain
        if flat == 1 and gain > usual - sd:
            measured = {c: stats for c, stats in levels.items() if c <= high.concurrency}
            self._levelled = high.tok_s >= self._target(measured, levelled=True)
            return self._stop(text) if self._levelled else None
        between = refine.middle(low.concurrency, high.concurrency, refine.GAP)
        if flat == 1 and between is not None:
            if between not in levels:
                return Step(between, self._half_s, "between")
            if levels[between].tok_s > (1 + max(0.01, sd)) * max(low.tok_s, high.tok_s):
                return self._stop(f"throughput peaks between {low.concurrency} and {high.concurrency} in flight")
        dropped = high.tok_s < (1 - max(self._settings.min_gain, 2 * sd)) * low.tok_s
        return None if flat <= self._settings.look_beyond and (dropped or flat > 1) else self._stop(text)

    def _stop(self, reason: str) -> Step | None:
        self._stopped = reason
        return None

    def _fitting(self) -> dict[int, LevelStats]:
        """Levels without a queue or rising retractions; a single request in flight always fits."""
        found: dict[int, LevelStats] = {}
        previous: LevelStats | None = None
        for level, stats in self.levels.items():
            if level == 1 or not (stats.queue_grows or retracts(stats, previous)):
                found[level] = previous = stats
        return self._smooth(found)[0]

    def _target(self, levels: dict[int, LevelStats], levelled: bool = False) -> float:
        best = max(stats.tok_s for stats in levels.values())
        if self._levelled or levelled:
            curve, most = self._smooth(levels)[1], best * (1 + 2 * self._settings.min_gain)
            best = min(most, max(best, curve.tok_s(self._top))) if curve else refine.ceiling(levels, self._top, most)
        return (1 - self._settings.tolerance) * best

    def _refine(self) -> Step | None:
        levels, fitting = self.levels, self._fitting()
        doublings = {self._start * 2**k for k in range(20)} | {self._top}
        most = MAX_REFINEMENTS if self._noise < NOISY else NOISY_REFINEMENTS
        if not levels or len(set(levels) - doublings) >= most:
            return None
        if not fitting:
            lowest = min(levels)
            ran = max(1, min(math.floor(levels[lowest].running), lowest - 1))
            return Step(ran, self._half_s, "lower")
        candidate = (
            refine.above_capacity(levels, fitting)
            or refine.hidden_peak(fitting, self._noise)
            or refine.below(fitting, self.choice, self._target(fitting), self._smooth(fitting)[1] is not None)
        )
        return Step(candidate, self._half_s, "refine") if candidate and candidate not in levels else None

    def _confirm(self) -> Step | None:
        fitting, window_s = self._fitting(), self._settings.window_s
        if not fitting:
            return None
        extra_s = sum(stats.seconds - window_s for stats in self.levels.values())
        if extra_s >= (MAX_CONFIRMATIONS - 0.5) * window_s:
            return None
        choice = self.choice
        error = smooth.error_after(fitting[choice], self._smooth(fitting)[1], self._noise, self._half_s)
        return Step(choice, window_s, "confirm") if error > CONFIDENT * self._settings.tolerance else None


def retracts(stats: LevelStats, previous: LevelStats | None) -> bool:
    """Retractions rise: at least one a window and more than at the next lower level."""
    return stats.retractions >= 1 and stats.retractions > (previous.retractions if previous else 0.0)


def overload(stats: LevelStats, previous: LevelStats | None) -> str:
    """Why a level ends the ramp, or an empty string."""
    if stats.queue_grows:
        return f"queue grows at {stats.concurrency} in flight: {stats.running:.0f} run, {stats.queued:.0f} wait"
    if retracts(stats, previous):
        return f"retractions rise at {stats.concurrency} in flight: {stats.retractions:.0f} a window"
    if stats.kv_full:
        return f"KV is full at {stats.concurrency} in flight: {stats.kv_usage:.0%}"
    return ""
