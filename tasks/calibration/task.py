"""Calibration, forecast and budget gate in Prefect. Not persisted: a retry must measure the servers of today."""

import asyncio
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.calibration import run as calibration
from tasks.calibration.budget import check, describe
from tasks.calibration.forecast import Rates
from tasks.calibration.outlook import estimate, made, record
from tasks.calibration.plots import throughput_png
from tasks.calibration.settings import BudgetSettings, CalibrationSettings
from tasks.records import CalibrationResult, GateReport
from tasks.runs import RunPaths
from tasks.ui import task as ui


@task(name="calibrate", persist_result=False, cache_policy=NO_CACHE)
async def calibrate(
    pool: Any,
    settings: CalibrationSettings,
    key: str,
    cache_dir: Path,
    capacities: dict[str, int | None] | None = None,
    watts: calibration.Watts | None = None,
) -> CalibrationResult:
    """Choose requests in flight for every server of a started engine. Raises ServerError when none can be measured."""

    def pending() -> int:
        progress = pool.progress()
        return int(progress.total - progress.done - progress.failed)

    def told(server: str, step: Any, window: Any) -> None:
        facts = {"server": server, "in_flight": window.concurrency, "tok_s": window.tok_s, "phase": step.phase}
        ui.event("regen.calibration.window", facts, f"regen.server.{server}")

    result = await calibration.calibrate(
        pool, settings, key, cache_dir, capacities=capacities, pending=pending, watts=watts, told=told
    )
    await asyncio.to_thread(_show, result)
    return result


def _show(result: CalibrationResult) -> None:
    chosen = ", ".join(f"{name} {limit}" for name, limit in result.limits.items())
    text = f"{chosen} in flight, {result.tok_s:,.0f} tok/s{' (kept from before)' if result.cached else ''}"
    ui.table("calibration", calibration.table(result), f"{text}. {result.stopped_because}")
    slow = calibration.stragglers(result)
    if slow:
        ui.event("regen.calibration.stragglers", slow)
    if png := throughput_png(result):
        ui.picture("calibration-plot", png, "Throughput over requests in flight", text)


@task(name="forecast-budget", persist_result=False, cache_policy=NO_CACHE)
async def forecast_against_budget(
    paths: RunPaths, pool: Any, rates: Rates, max_tokens: int | None, budget: BudgetSettings
) -> GateReport:
    """Forecast what the engine has left and hold it against the budget; the flow decides what the report means."""
    progress, (lengths, ages) = pool.progress(), pool.lengths()
    forecast = await asyncio.to_thread(estimate, progress, lengths, ages, rates, max_tokens)
    report = check(forecast, budget, rates.gpus, progress.elapsed_s)
    if forecast is not None:
        await asyncio.to_thread(record, paths.forecast, [made(forecast, progress)])
        hours = describe(tuple(seconds / 3600 for seconds in forecast.time_s), "h")
        rows = [
            {"what": "time", "median (90 % interval)": hours},
            {"what": "output tokens", "median (90 % interval)": describe(forecast.tokens)},
            {"what": "energy, kWh", "median (90 % interval)": describe(forecast.energy_kwh)},
            {"what": "cost", "median (90 % interval)": describe(forecast.cost)},
        ]
        await asyncio.to_thread(ui.table, "forecast", rows, f"{forecast.remaining_prompts:,} prompts: {hours}")
    await asyncio.to_thread(ui.gate, report)
    return report
