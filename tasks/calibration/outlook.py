"""From a calibration and the engine's lengths to a forecast, an ETA for progress, and a record of what was forecast."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tasks.calibration.forecast import Interval, Rates, forecast
from tasks.calibration.levels import LevelStats, summarize
from tasks.calibration.run import by_server
from tasks.calibration.settings import BudgetSettings
from tasks.records import CalibrationResult, Forecast, Progress
from tasks.runs import read_json, write_json

ETA_EVERY_S = 20.0
"""An estimate costs about 50 ms; once in this many seconds is far below 1 % of a core."""

HISTORY_SHARE = 0.005
"""A forecast is kept for the report each time this share of the prompts was settled."""

ETA_REPLICATES = 150


def rates_from(
    result: CalibrationResult, budget: BudgetSettings | None = None, gpus: int = 0, tok_s: float | None = None
) -> Rates:
    """Throughput, watts and prices of the fleet at its chosen limits; `tok_s` where calibration measured none."""
    budget = budget or BudgetSettings()
    levels = {name: summarize(windows) for name, windows in by_server(result).items()}
    chosen = [levels[name].get(limit) for name, limit in result.limits.items()]
    watts = [stats.power_w if stats else None for stats in chosen]
    return Rates(
        tok_s=result.tok_s or tok_s or 0.0,
        concurrency=max(1, sum(result.limits.values())),
        curve=_fleet_curve(list(levels.values())),
        power_w=sum(w for w in watts if w is not None) if watts and None not in watts else None,
        gpus=gpus,
        price_per_gpu_hour=budget.price_per_gpu_hour,
        price_per_kwh=budget.price_per_kwh,
    )


def _fleet_curve(servers: list[dict[int, LevelStats]]) -> tuple[tuple[float, float], ...]:
    """Levels that every server was measured at: (requests over the fleet, tokens/s over the fleet)."""
    if not servers:
        return ()
    common = set(servers[0]).intersection(*servers[1:])
    return tuple(
        (float(level * len(servers)), sum(levels[level].tok_s for levels in servers)) for level in sorted(common)
    )


class Outlook:
    """The running estimate of one run: call `update` with progress and lengths; `eta` is for Progress.

    `lengths`: a sample of finished output lengths and the ages in tokens of what is in flight (`Engine.lengths`).
    `clock` is a monotonic clock in seconds. With `path`, the history is kept there (forecast.json) for the report.
    """

    def __init__(
        self,
        rates: Rates,
        max_tokens: int | None,
        path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rates, self._max_tokens, self._path, self._clock = rates, max_tokens, path, clock
        self._made_at = -1e9
        self.latest: Forecast | None = None
        self.history: list[dict[str, Any]] = []

    def update(self, progress: Progress, lengths: Sequence[float], ages: Sequence[float]) -> Forecast | None:
        """Estimate again when the last one is older than ETA_EVERY_S; otherwise the last one."""
        now = self._clock()
        if now - self._made_at < ETA_EVERY_S:
            return self.latest
        self._made_at = now
        rates = replace(self._rates, tok_s=progress.tok_s or self._rates.tok_s)
        self.latest = estimate(progress, lengths, ages, rates, self._max_tokens, ETA_REPLICATES)
        noted = self.history[-1]["done"] if self.history else -progress.total
        if self.latest is not None and progress.done - noted >= HISTORY_SHARE * progress.total:
            self.history.append(made(self.latest, progress))
            if self._path is not None:
                record(self._path, self.history[-1:])
        return self.latest

    @property
    def eta(self) -> Interval | None:
        """(median, low, high) seconds that remain, counted down since the last estimate."""
        if self.latest is None:
            return None
        gone = self._clock() - self._made_at
        median, low, high = (max(0.0, value - gone) for value in self.latest.time_s)
        return median, low, high


def estimate(
    progress: Progress,
    lengths: Sequence[float],
    ages: Sequence[float],
    rates: Rates,
    max_tokens: int | None,
    replicates: int = 400,
) -> Forecast | None:
    """Forecast of what `progress` leaves. None while nothing has finished."""
    return forecast(
        lengths,
        ages,
        max(0, progress.total - progress.done - progress.failed),
        rates.tok_s,
        rates.concurrency,
        max_tokens=max_tokens,
        rates=rates,
        replicates=replicates,
        finished=progress.done,
    )


def made(value: Forecast, progress: Progress) -> dict[str, Any]:
    """One forecast as it was made: the record's fields, Unix seconds, and what it says of the whole invocation.

    `total_s`: seconds from the engine's start to the end, (median, low, high); `total_tokens` likewise.
    """
    return {
        **asdict(value),
        "made_s": time.time(),
        "elapsed_s": progress.elapsed_s,
        "done": progress.done,
        "total_s": [progress.elapsed_s + seconds for seconds in value.time_s],
        "total_tokens": [progress.output_tokens + tokens for tokens in value.tokens],
    }


def record(path: Path, entries: Sequence[dict[str, Any]], **actual: Any) -> None:
    """Append forecasts to forecast.json; `actual` (actual_s, actual_tokens) closes it when the run has ended."""
    known = read_json(path) if path.exists() else {}
    write_json(path, {**known, "forecasts": [*known.get("forecasts", []), *entries], **actual})
