"""The power room's Prefect tasks: gates with a second probe before a run is stopped, and a diagnosis for the UI."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.errors import GateError
from tasks.power import gate
from tasks.power.baseline import Baselines
from tasks.power.diagnosis import Diagnosis, diagnose
from tasks.power.plot import gate_picture
from tasks.power.rig import Rig
from tasks.records import GateReport, Server
from tasks.ui import task as ui

GATE_TIMEOUT_S = 1800
FRESH: dict[str, Any] = {"persist_result": False, "cache_policy": NO_CACHE}
"""A resumed run probes again: yesterday's watts say nothing about today's GPU."""


async def _show(report: GateReport, rig: Rig) -> GateReport:
    """Artifacts and event; raises GateError when the report stops the run."""
    ui.gate(report)
    starts = [span[0] for span in (report.details.get("windows") or {}).values()]
    if starts:
        samples = rig.sampler.since(min(starts) - rig.settings.idle_s - 5)
        png = await asyncio.to_thread(ui.drawn, gate_picture, report, samples)
        if png:
            ui.picture(f"watts-{report.gate}".replace("_", "-"), png, f"{report.verdict}: watts during the probe")
    if report.stops:
        raise GateError(f"{report.gate}: {report.verdict}: {report.summary}", report.as_dict())
    return report


@task(name="power-hard-rules", retries=1, retry_delay_seconds=5, timeout_seconds=GATE_TIMEOUT_S, **FRESH)
async def hard_rules(rig: Rig) -> GateReport:
    """Hung, hardware-throttled, or speculation absent? Raises GateError after the retries."""
    return await _show(await gate.hard_rules(rig), rig)


@task(name="power-baseline", retries=1, retry_delay_seconds=5, timeout_seconds=GATE_TIMEOUT_S, **FRESH)
async def baseline_gate(
    rig: Rig, limits: Mapping[str, int], baselines: Baselines, hard_rules_passed: bool = True
) -> GateReport:
    """As fast as when it was known good? Raises GateError after the retries (each is a new probe)."""
    report = await gate.baseline_gate(rig, limits, baselines, hard_rules_passed=hard_rules_passed)
    return await _show(report, rig)


@task(name="power-diagnose", timeout_seconds=600, **FRESH)
async def diagnose_server(rig: Rig, server: Server, folder: Path | None = None) -> Diagnosis:
    """Why is the GPU starved? A table of hypotheses and the shares of GPU time, as artifacts."""
    found = await diagnose(rig, server, folder=folder)
    show_diagnosis(found)
    return found


def show_diagnosis(found: Diagnosis) -> None:
    """The hypothesis table and the kernel shares in the UI."""
    name = "".join(c if c.isalnum() else "-" for c in found.server.name.lower())
    ui.table(f"diagnosis-{name}", found.rows(), f"{found.judgement.code.value}: {found.judgement.summary}")
    if found.profile is not None:
        shares = {**found.profile.shares, "gaps": found.profile.gaps}
        rows = [{"work": work, "share of GPU time": f"{share:.1%}"} for work, share in shares.items()]
        ui.table(f"kernels-{name}", rows, "Where the GPU's time goes")


def live_event(report: GateReport) -> None:
    """Listener for LiveWatch: a verdict changed."""
    payload = {"verdict": report.verdict, "level": report.level.value, "summary": report.summary}
    ui.event("regen.power.live", payload)
