"""Calibration, forecast and budget gate in Prefect. Not persisted: a retry must measure the servers of today."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.calibration import run as calibration
from tasks.calibration.budget import check, rows_of
from tasks.calibration.forecast import Rates
from tasks.calibration.latency import LatencyProbe
from tasks.calibration.outlook import estimate, made, record
from tasks.calibration.plots import throughput_png
from tasks.calibration.search import Step
from tasks.calibration.settings import BudgetSettings, CalibrationSettings
from tasks.records import CalibrationResult, GateReport, LoadDriver, LoadWindow, Progress, Server
from tasks.ui import task as ui


@task(name="calibrate", persist_result=False, cache_policy=NO_CACHE)
async def calibrate_servers(
    driver: LoadDriver,
    settings: CalibrationSettings,
    key: str,
    cache_dir: Path,
    *,
    capacities: Mapping[str, int | None] | None = None,
    pending: Callable[[], int] | None = None,
    watts: calibration.Watts | None = None,
    servers: Sequence[Server] = (),
) -> CalibrationResult:
    """Choose requests in flight for every server of a started engine. Raises ServerError when none can be measured.

    With `servers`, time to first token is probed once a level.
    """

    probe = LatencyProbe(servers) if servers else None
    result = await calibration.calibrate(
        driver, settings, key, cache_dir, capacities=capacities, pending=pending, watts=watts, ttft=probe, told=_told
    )
    await asyncio.to_thread(_show, result)
    return result


def _told(server: str, step: Step, window: LoadWindow) -> None:
    facts = {"in_flight": window.concurrency, "tok_s": window.tok_s, "phase": step.phase}
    ui.event("regen.calibration.window", facts, f"regen.server.{server}")


def _show(result: CalibrationResult) -> None:
    text = calibration.describe(result)
    ui.table("calibration", calibration.table(result), text)
    if slow := calibration.stragglers(result):
        ui.event("regen.calibration.stragglers", slow)
    if png := ui.drawn(throughput_png, result):
        ui.picture("calibration-plot", png, "Throughput over requests in flight", text)


@task(name="forecast", persist_result=False, cache_policy=NO_CACHE)
async def forecast_gate(
    progress: Progress,
    lengths: tuple[Sequence[float], Sequence[float]],
    rates: Rates,
    max_tokens: int | None,
    budget: BudgetSettings,
    path: Path,
) -> GateReport:
    """Forecast what `progress` leaves, note it in `path`, and hold it against the budget; the flow decides.

    `lengths`: (output lengths that finished, tokens so far of what is in flight), as the engine tells them.
    """
    forecast = await asyncio.to_thread(estimate, progress, *lengths, rates, max_tokens)
    report = check(forecast, budget, rates.gpus, progress.elapsed_s)
    if forecast is not None:
        await asyncio.to_thread(record, path, [made(forecast, progress)])
        await asyncio.to_thread(ui.table, "forecast", rows_of(forecast), report.summary)
    await asyncio.to_thread(ui.gate, report)
    return report
