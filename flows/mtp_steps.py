"""Compare numbers of MTP draft steps on the real job: one start of the servers each, answers kept as always."""

import asyncio
from dataclasses import replace

from flows import machines
from flows.session import Session
from flows.spec import RegenSpec
from flows.stages import Prompts
from tasks.calibration.mtp_compare import Comparison, compare, rows_of
from tasks.calibration.run import by_server
from tasks.errors import GateError, ServerError, SpecError
from tasks.records import CalibrationResult, LoadWindow
from tasks.ui import task as ui


def with_steps(spec: RegenSpec, steps: int) -> RegenSpec:
    """The same job with `steps` draft steps (0: MTP off). Neither is part of the run's identity."""
    if steps == 0:
        return spec.model_copy(update={"target": spec.target.model_copy(update={"mtp": False})})
    mtp = spec.serving.mtp.model_copy(update={"steps": steps, "topk": 1, "draft_tokens": steps + 1})
    target = spec.target.model_copy(update={"mtp": True})
    return spec.model_copy(update={"serving": spec.serving.model_copy(update={"mtp": mtp}), "target": target})


async def compare_steps(run: Session, prompts: Prompts) -> Comparison:
    """Calibrate with each of `compare_mtp_steps`, show the table, and say which is best.

    Raises SpecError for servers that are not ours to restart, ServerError when no setting could be measured.
    """
    if run.spec.serving.mode not in ("process", "docker"):
        raise SpecError(
            f"calibration.compare_mtp_steps restarts the servers, but serving.mode is {run.spec.serving.mode}: "
            "compare with mode process or docker"
        )
    windows: dict[int, list[LoadWindow]] = {}
    limits: dict[int, int] = {}
    failures: dict[int, str] = {}
    for steps in dict.fromkeys(run.spec.calibration.compare_mtp_steps):
        try:
            found = await measure(replace(run, spec=with_steps(run.spec, steps)), prompts)
        except (ServerError, GateError) as error:
            failures[steps] = str(error)
            continue
        server = min(found.limits)
        windows[steps], limits[steps] = by_server(found)[server], found.limits[server]
    try:
        result = compare(windows, limits)
    except ValueError as error:
        told = "; ".join(f"{steps} steps: {reason}" for steps, reason in failures.items())
        raise ServerError(f"no MTP setting could be measured ({told or error}); look at the servers' logs") from error
    rows = rows_of(result, failures)
    run.note(mtp_comparison={"rows": rows, "best_steps": result.best.steps, "reason": result.reason})
    await asyncio.to_thread(ui.table, "mtp-steps", rows, result.reason)
    return result


async def measure(run: Session, prompts: Prompts) -> CalibrationResult:
    """One start of the servers, canaries, one calibration."""
    async with machines.servers(run) as (fleet, rig):
        await machines.canaries(run, fleet)
        async with machines.engine(run, fleet, rig, prompts) as work:
            return await machines.calibration(run, rig, work)
