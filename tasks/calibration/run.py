"""Calibrate every server of a fleet beside each other through a LoadDriver. Answers made meanwhile stay answers.

A server that cannot be measured (down, no steady window) is left out and named; the others go on. Results are kept in
a folder under their key, so that the same job on the same servers is not measured twice.
"""

import asyncio
import hashlib
import json
import logging
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tasks.calibration.levels import summarize
from tasks.calibration.search import Search, Step
from tasks.calibration.settings import CalibrationSettings
from tasks.errors import ServerError, StorageError
from tasks.records import CalibrationResult, LoadDriver, LoadWindow
from tasks.runs import read_json, write_json

log = logging.getLogger(__name__)

OVERDUE_S = 60.0
"""A window may take this much longer than it was allowed to before its server is given up."""

WORK_FACTOR = 2
"""Prompts that must be left for each request in flight: a window needs every slot to be filled again."""

SAME_LEVEL = ("half", "again", "confirm")
"""Phases that measure a level once more."""

POLL_S = 1.0
"""Seconds between looks at the work that is left while a window is measured."""

DRAINED = 1.1
"""Running at most this multiple of the limit counts as drained after the limit was lowered."""

STRAGGLER = 0.85
"""A server below this share of the fleet's median throughput holds the others up in the tail."""

VERSION = 1

Watts = Callable[[str, float], float | None]
"""(server, seconds) -> mean watts of the GPUs behind it over the last seconds, None without sensors."""

Ttft = Callable[[str], Awaitable[float | None]]
"""Time to first token of a server at its present load (latency.LatencyProbe)."""

Told = Callable[[str, Step, LoadWindow], None]


async def calibrate(
    driver: LoadDriver,
    settings: CalibrationSettings,
    key: str,
    cache_dir: Path,
    *,
    capacities: Mapping[str, int | None] | None = None,
    pending: Callable[[], int] | None = None,
    watts: Watts | None = None,
    ttft: Ttft | None = None,
    told: Told | None = None,
) -> CalibrationResult:
    """Choose requests in flight for every live server and leave the driver at them.

    `capacities`: requests that each server says it runs at once. `pending`: prompts not yet answered; the search ends
    before they run short, and what it raises (a gate's no) ends calibration. `watts`: mean power behind a server over
    its last seconds. `ttft` probes once a level. `told` hears of every window. Raises ServerError when no server
    could be measured.
    """
    names = driver.servers()
    if not names:
        raise ServerError("there is no live server to calibrate; look at the servers' logs")
    if not settings.enabled:
        return _apply(driver, CalibrationResult(dict.fromkeys(names, settings.start), 0.0, (), key, False, "off"))
    if settings.use_cache and (known := read_cached(cache_dir, key)) is not None:
        return _apply(driver, _adapted(known, names, settings.limit, capacities or {}))
    searches = {name: Search(settings, (capacities or {}).get(name)) for name in names}
    failures: dict[str, str] = {}
    meter = _Meter(driver, settings, pending or (lambda: sys.maxsize), watts, ttft, told)
    try:
        async with asyncio.TaskGroup() as group:
            for name, search in searches.items():
                group.create_task(_one(meter, name, search, failures))
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    result = _gather(searches, failures, key)
    if result.tok_s > 0 and not failures:
        write_json(cache_path(cache_dir, key), as_dict(result))
    return result


@dataclass(frozen=True, slots=True)
class _Meter:
    """Takes windows from the driver, and adds what the driver does not know."""

    driver: LoadDriver
    settings: CalibrationSettings
    pending: Callable[[], int]
    watts: Watts | None
    ttft: Ttft | None
    told: Told | None

    def enough_work(self, step: Step) -> bool:
        """Whether a window at `step` can be kept full on every server."""
        return self.pending() >= WORK_FACTOR * step.concurrency * len(self.driver.servers())

    async def measure(self, name: str, step: Step) -> LoadWindow:
        """One window; those taken while answers of a higher limit are still running are dropped."""
        self.driver.set_limit(name, step.concurrency)
        longest = max(self.settings.max_window_s, 2 * step.min_s)
        window = await self._window(name, step, longest)
        drops = max(1, round(2 * longest / step.min_s))
        while window.mean_running > DRAINED * window.concurrency + 1 and drops > 0:
            window, drops = await self._window(name, step, longest), drops - 1
        window = self._completed(name, window)
        if self.ttft is not None and window.ttft_s is None and step.phase not in SAME_LEVEL:
            window = replace(window, ttft_s=await self.ttft(name))
        log.info("%s %s %d: %.0f tok/s", name, step.phase, window.concurrency, window.tok_s)
        if self.told is not None:
            self.told(name, step, window)
        return window

    async def _window(self, name: str, step: Step, max_s: float) -> LoadWindow:
        """The driver's window, cut short when the prompts run out: a limit that cannot be filled is not waited for."""
        waiting = asyncio.ensure_future(self.driver.window(name, step.min_s, max_s))
        try:
            async with asyncio.timeout(2 * max_s + OVERDUE_S):
                while not waiting.done() and self.pending() > 0:
                    await asyncio.wait({waiting}, timeout=min(POLL_S, step.min_s / 4))
                return (
                    await waiting if waiting.done() else LoadWindow(name, step.concurrency, 0.0, 0.0, 0.0, starved=True)
                )
        finally:
            waiting.cancel()

    def _completed(self, name: str, window: LoadWindow) -> LoadWindow:
        """Watts from the sensors; mean ITL in a steady state is requests running over tokens per second."""
        power_w, itl_s = window.power_w, window.itl_s
        if power_w is None and self.watts is not None:
            power_w = self.watts(name, window.duration_s)
        if itl_s is None and window.tok_s > 0:
            itl_s = window.mean_running / window.tok_s
        return replace(window, power_w=power_w, itl_s=itl_s)


async def _one(meter: _Meter, name: str, search: Search, failures: dict[str, str]) -> None:
    try:
        while (step := search.next()) is not None:
            if not meter.enough_work(step):
                search.finish(f"{meter.pending()} prompts left are too few for {step.concurrency} in flight")
                break
            search.observe(await meter.measure(name, step))
    except (ServerError, TimeoutError, KeyError) as error:
        failures[name] = f"{type(error).__name__} {error}".strip()
        log.warning("%s could not be calibrated: %s", name, failures[name])
        return
    meter.driver.set_limit(name, search.choice)


def _gather(searches: Mapping[str, Search], failures: Mapping[str, str], key: str) -> CalibrationResult:
    if len(failures) == len(searches):
        shown = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise ServerError(f"no server could be calibrated ({shown}); look at their logs, then run again")
    reasons = [f"{name}: {failures.get(name) or search.stopped_because}" for name, search in searches.items()]
    return CalibrationResult(
        limits={name: search.choice for name, search in searches.items() if name not in failures},
        tok_s=sum(search.tok_s for search in searches.values()),
        windows=tuple(window for search in searches.values() for window in search.windows),
        key=key,
        stopped_because="; ".join(reasons),
    )


def _apply(driver: LoadDriver, result: CalibrationResult) -> CalibrationResult:
    for name, limit in result.limits.items():
        driver.set_limit(name, limit)
    return result


def _adapted(
    known: CalibrationResult, names: list[str], most: int, capacities: Mapping[str, int | None]
) -> CalibrationResult:
    """A cached result for the servers and limits of today: an unknown name gets the median of the known ones."""
    usual = round(statistics.median(known.limits.values()))
    limits = {name: min(known.limits.get(name, usual), most, capacities.get(name) or most) for name in names}
    tok_s = known.tok_s * len(names) / len(known.limits)
    return CalibrationResult(limits, tok_s, known.windows, known.key, True, known.stopped_because)


def calibration_key(**job: Any) -> str:
    """Digest of everything that moves the best concurrency: GPU, model, workload, server arguments, versions."""
    text = json.dumps(job, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cache_path(cache_dir: Path, key: str) -> Path:
    """Where the result of `key` is kept."""
    return cache_dir / f"calibration-{key}.json"


def read_cached(cache_dir: Path, key: str) -> CalibrationResult | None:
    """The kept result of `key`; None when there is none or it is not readable (then it is measured again)."""
    path = cache_path(cache_dir, key)
    if not path.exists():
        return None
    try:
        value = read_json(path)
        return from_dict(value) if value.get("version") == VERSION else None
    except (StorageError, KeyError, TypeError) as error:
        log.warning("%s is measured again: %s", path, error)
        return None


def as_dict(result: CalibrationResult) -> dict[str, Any]:
    """JSON-able form, for calibration.json and the cache."""
    return {"version": VERSION, **asdict(result), "limits": dict(result.limits)}


def from_dict(value: Mapping[str, Any]) -> CalibrationResult:
    """The inverse of `as_dict`. Raises KeyError or TypeError for something else."""
    windows = tuple(LoadWindow(**window) for window in value["windows"])
    return CalibrationResult(
        dict(value["limits"]), float(value["tok_s"]), windows, value["key"], value["cached"], value["stopped_because"]
    )


def by_server(result: CalibrationResult) -> dict[str, list[LoadWindow]]:
    """Windows of each server, in order."""
    groups: dict[str, list[LoadWindow]] = {name: [] for name in result.limits}
    for window in result.windows:
        groups.setdefault(window.server, []).append(window)
    return groups


def stragglers(result: CalibrationResult) -> dict[str, float]:
    """Servers below STRAGGLER of the fleet's median throughput at their choices, with their share of it."""
    speeds = {}
    for name, windows in by_server(result).items():
        stats = summarize(windows).get(result.limits.get(name, 0))
        if stats is not None:
            speeds[name] = stats.tok_s
    if len(speeds) < 2:
        return {}
    usual = statistics.median(speeds.values()) if len(speeds) > 2 else max(speeds.values())
    return {name: speed / usual for name, speed in speeds.items() if speed < STRAGGLER * usual}


def describe(result: CalibrationResult) -> str:
    """One line: what was chosen and why the search ended."""
    chosen = ", ".join(f"{name} {limit}" for name, limit in result.limits.items())
    slow = "".join(f", {name} at {share:.0%} of the others" for name, share in stragglers(result).items())
    kept = " (kept from before)" if result.cached else ""
    reason = f": {result.stopped_because}" if result.stopped_because else ""
    return f"{chosen} in flight, {result.tok_s:,.0f} tok/s{kept}{slow}{reason}"


def table(result: CalibrationResult) -> list[dict[str, Any]]:
    """One row a server and level, as people read it: field definitions are in metrics.py."""
    rows = []
    for name, windows in by_server(result).items():
        for level, stats in summarize(windows).items():
            rows.append(
                {
                    "server": name,
                    "in flight": level,
                    "chosen": "✓" if result.limits.get(name) == level else "",
                    "output tok/s": round(stats.tok_s, 1),
                    "running": round(stats.running, 1),
                    "queued": round(stats.queued, 1),
                    "KV use": _rounded(stats.kv_usage, 3),
                    "retractions": round(stats.retractions, 1),
                    "acceptance length": _rounded(stats.accept_length, 2),
                    "W": _rounded(stats.power_w, 0),
                    "J/token": _rounded(stats.j_per_token, 3),
                    "TTFT s": _rounded(stats.ttft_s, 3),
                    "ITL ms": _rounded(None if stats.itl_s is None else 1000 * stats.itl_s, 2),
                    "seconds": round(stats.seconds, 1),
                }
            )
    return rows


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
