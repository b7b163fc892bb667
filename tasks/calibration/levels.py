"""What is known about each concurrency that was tried: duration-weighted means, noise, and signs of overload."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tasks.records import LoadWindow

PRIOR_NOISE = 0.015
"""Relative standard deviation assumed of half a window before any level was measured (a 7 s window in which no request
starts or ends repeats within 0.5 % on a GPU; a closed loop over natural lengths is several times noisier)."""

QUEUED_SHARE = 0.1
"""More than this share of the wanted requests waiting in the server's queue means that it runs at its own limit."""

KV_FULL = 0.95
"""KV use (share of the pool) from which a further doubling can only queue or retract."""


@dataclass(frozen=True, slots=True)
class LevelStats:
    """All usable windows of one server at one concurrency. `tok_s` is output tokens per second of the server."""

    concurrency: int
    windows: int
    seconds: float
    tok_s: float
    running: float
    queued: float
    retractions: float
    kv_usage: float | None
    power_w: float | None
    accept_length: float | None
    ttft_s: float | None
    itl_s: float | None

    @property
    def j_per_token(self) -> float | None:
        """Joules per output token: mean watts over output tokens per second."""
        return self.power_w / self.tok_s if self.power_w is not None and self.tok_s > 0 else None

    @property
    def queue_grows(self) -> bool:
        """The server does not run what it is given."""
        return self.queued > max(1.0, QUEUED_SHARE * self.concurrency)

    @property
    def kv_full(self) -> bool:
        """No room for more context."""
        return self.kv_usage is not None and self.kv_usage >= KV_FULL


def usable(window: LoadWindow) -> bool:
    """Whether a window measures its concurrency: steady, with work in every slot, and with tokens."""
    return not window.starved and window.duration_s > 0 and window.output_tokens > 0


def summarize(windows: Iterable[LoadWindow]) -> dict[int, LevelStats]:
    """Levels of one server in ascending order; unusable windows are left out."""
    groups: dict[int, list[LoadWindow]] = {}
    for window in windows:
        if usable(window):
            groups.setdefault(window.concurrency, []).append(window)
    return {level: _stats(level, groups[level]) for level in sorted(groups)}


def noise(windows: Sequence[LoadWindow], unit_s: float) -> float:
    """Relative standard deviation of the tok/s of one window of `unit_s` seconds, pooled over all levels.

    Every level is measured in two halves, so this is known from the first level on. A prior of one degree of freedom
    at PRIOR_NOISE keeps two lucky halves from claiming no noise at all. A longer window's variance falls as 1 / length.
    """
    good = [window for window in windows if usable(window)]
    levels = summarize(good)
    squares = sum(
        window.duration_s / unit_s * (window.tok_s / levels[window.concurrency].tok_s - 1) ** 2 for window in good
    )
    return math.sqrt((PRIOR_NOISE**2 + squares) / (1 + len(good) - len(levels)))


def relative_error(stats: LevelStats, sd: float, unit_s: float) -> float:
    """Relative standard error of a level's tok/s, given the noise `sd` of one window of `unit_s` seconds."""
    return sd * math.sqrt(unit_s / max(stats.seconds, unit_s))


def _stats(level: int, windows: list[LoadWindow]) -> LevelStats:
    seconds = sum(window.duration_s for window in windows)
    return LevelStats(
        concurrency=level,
        windows=len(windows),
        seconds=seconds,
        tok_s=sum(window.output_tokens for window in windows) / seconds,
        running=_mean(windows, "mean_running") or 0.0,
        queued=_mean(windows, "mean_queued") or 0.0,
        retractions=sum(window.retractions for window in windows) / len(windows),
        kv_usage=_mean(windows, "kv_usage"),
        power_w=_mean(windows, "power_w"),
        accept_length=_mean(windows, "accept_length"),
        ttft_s=_mean(windows, "ttft_s"),
        itl_s=_mean(windows, "itl_s"),
    )


def _mean(windows: list[LoadWindow], name: str) -> float | None:
    pairs = [(getattr(w, name), w.duration_s) for w in windows if getattr(w, name) is not None]
    weight = sum(seconds for _, seconds in pairs)
    return sum(value * seconds for value, seconds in pairs) / weight if weight else None
