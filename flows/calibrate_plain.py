"""Calibration of running servers without Prefect: what `regen calibrate` does."""

import asyncio
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.outcome import Outcome
from tasks.calibration import run as calibration
from tasks.calibration.budget import check, rows_of
from tasks.calibration.latency import LatencyProbe
from tasks.calibration.outlook import estimate, made, rates_from, record
from tasks.calibration.plots import throughput_png
from tasks.calibration.search import Step
from tasks.calibration.settings import BudgetSettings, CalibrationSettings
from tasks.errors import DatasetError, GateError
from tasks.generation.engine import Engine
from tasks.generation.settings import GenerationSettings
from tasks.provisioning.fleet import open_fleet
from tasks.provisioning.settings import ServingSettings
from tasks.records import CalibrationResult, LoadWindow, Server
from tasks.runs import RunPaths, new_run_id, write_atomic, write_json
from tasks.settings import SamplingSettings, TargetSettings
from tasks.target.load import load_target
from tasks.validation.run import validate
from tasks.validation.settings import SourceSettings

GATE_FAILED = 3
GENERATION = GenerationSettings()
screen = Console(stderr=True, width=None if sys.stderr.isatty() else 160, highlight=False)


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, as given."""

    urls: tuple[str, ...]
    prompts: tuple[str, ...]
    target: str
    out: str
    max_tokens: int
    thinking: bool
    temperature: float | None
    start: int
    limit: int
    window_s: float
    cache: bool
    deadline_h: float | None
    price_per_gpu_hour: float | None
    max_cost: float | None
    gpus: int
    api_key_env: str

    def paths(self) -> RunPaths:
        """A new run folder under --out."""
        return RunPaths(Path(self.out).resolve(), new_run_id())

    @property
    def settings(self) -> CalibrationSettings:
        """The search's settings."""
        return CalibrationSettings(
            start=self.start,
            limit=self.limit,
            window_s=self.window_s,
            max_window_s=max(120.0, 2 * self.window_s),
            use_cache=self.cache,
        )

    @property
    def budget(self) -> BudgetSettings:
        """What the forecast is held against."""
        return BudgetSettings(
            deadline_h=self.deadline_h, max_cost=self.max_cost, price_per_gpu_hour=self.price_per_gpu_hour
        )

    @property
    def sampling(self) -> SamplingSettings:
        """How the target samples."""
        return SamplingSettings(max_tokens=self.max_tokens, thinking=self.thinking, temperature=self.temperature)


async def calibrate_plainly(options: Options) -> dict[str, Any]:
    """Validate, attach, measure, forecast, show. Raises Outcome with status 3 when the budget gate stops."""
    paths = options.paths()
    target_settings = TargetSettings(model=options.target)
    target = await asyncio.to_thread(load_target, target_settings)
    prompts = await asyncio.to_thread(validate, SourceSettings(paths=options.prompts), target, paths.run_dir)
    if not prompts.kept:
        raise DatasetError(f"none of {prompts.rows} rows is a usable prompt; {prompts.rejected_path} has the reasons")
    serving = ServingSettings(mode="attach", urls=options.urls, api_key_env=options.api_key_env)
    fleet = await asyncio.to_thread(
        open_fleet, serving, target_settings, paths, max_tokens=options.max_tokens, progress=screen.print
    )
    try:
        engine = Engine(
            paths, target, options.sampling, GENERATION, fleet.servers,
            limits=options.start, prompts_path=prompts.prompts_path,
        )  # fmt: skip
        fleet.subscribe(engine)
        return await _measure(options, paths, engine, fleet.servers)
    finally:
        await asyncio.to_thread(fleet.close)


async def _measure(options: Options, paths: RunPaths, engine: Engine, servers: list[Server]) -> dict[str, Any]:
    key = calibration.calibration_key(
        servers=[[s.engine, s.version, s.model, dict(s.arguments)] for s in servers],
        sampling=options.sampling.model_dump(mode="json"),
        prompts=options.prompts,
    )

    def pending() -> int:
        breaker = engine.report()  # as it stands; the engine itself stops from min_answers on
        enough = breaker is not None and breaker.details.get("window", 0) >= GENERATION.breaker.min_answers
        if breaker is not None and breaker.stops and enough:
            raise GateError(f"the answers are no good: {breaker.summary}", breaker.as_dict())
        progress = engine.progress()
        return progress.total - progress.done - progress.failed

    await asyncio.to_thread(engine.start)
    began_s = time.monotonic()
    try:
        result = await calibration.calibrate(
            engine, options.settings, key, paths.dataset_dir,
            capacities={s.name: s.max_running_requests for s in servers}, pending=pending,
            ttft=LatencyProbe(servers), told=_told,
        )  # fmt: skip
        progress, lengths = engine.progress(), engine.lengths()
    finally:
        await asyncio.shield(engine.stop("calibrated"))
    rates = rates_from(result, options.budget, options.gpus, progress.tok_s)
    forecast = await asyncio.to_thread(estimate, progress, *lengths, rates, options.max_tokens)
    report = check(forecast, options.budget, options.gpus, progress.elapsed_s)
    write_json(paths.calibration, calibration.as_dict(result))
    files = [str(paths.calibration)]
    if png := throughput_png(result):
        plot = paths.run_dir / "calibration.png"
        write_atomic(plot, png)
        files.append(str(plot))
    if forecast is not None:
        record(paths.forecast, [made(forecast, progress)])
        files.append(str(paths.forecast))
    _show(result)
    for row in rows_of(forecast) if forecast else ():
        screen.print(f"{row['what']:24} {row['median (90 % interval)']}")
    screen.print(f"{report.verdict}: {report.summary}")
    payload = {
        "limits": dict(result.limits),
        "tok_s": round(result.tok_s, 2),
        "stopped_because": result.stopped_because,
        "stragglers": calibration.stragglers(result),
        "answers": progress.done,
        "seconds": round(time.monotonic() - began_s, 1),
        "forecast": asdict(forecast) if forecast else None,
        "budget": report.verdict,
        "run_dir": str(paths.run_dir),
        "files": files,
    }
    if report.stops:
        raise Outcome(payload, GATE_FAILED)
    return payload


def _told(server: str, step: Step, window: LoadWindow) -> None:
    screen.print(f"{server} {step.phase:8} {window.concurrency:4} in flight {window.tok_s:10,.1f} tok/s")


def _show(result: CalibrationResult) -> None:
    rows = calibration.table(result)
    if not rows:
        return
    grid = Table(title=calibration.describe(result))
    names = [name for name in rows[0] if any(row[name] not in (None, "", 0) for row in rows)]
    for name in names:
        grid.add_column(name, justify="right")
    for row in rows:
        grid.add_row(*("" if row[name] is None else str(row[name]) for name in names))
    screen.print(grid)
