"""Prefect's side of provisioning: nothing here is persisted, since servers of an earlier attempt are gone."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.provisioning.canary import thinking_canary as ask_canary
from tasks.provisioning.fleet import Fleet, open_fleet_async
from tasks.provisioning.gpus import GpuReader
from tasks.provisioning.mtp import mtp_gate as probe_mtp
from tasks.provisioning.parity import compare
from tasks.provisioning.settings import ServingSettings
from tasks.records import GateReport, Server
from tasks.runs import RunPaths
from tasks.settings import SamplingSettings, TargetSettings
from tasks.target.text import TargetText
from tasks.ui import task as ui


@task(name="provision", persist_result=False, cache_policy=NO_CACHE)
async def provision(
    serving: ServingSettings,
    target: TargetSettings,
    paths: RunPaths,
    sampling: SamplingSettings,
    progress: Callable[[str], None] | None = None,
    gpus: GpuReader | None = None,
) -> Fleet:
    """Servers that answer, watched from now on; the caller closes the fleet. A cancel ends a start under way."""
    fleet = await open_fleet_async(
        serving, target, paths, max_tokens=sampling.max_tokens, thinking=sampling.thinking, progress=progress, gpus=gpus
    )
    ui.table("servers", [_row(server) for server in fleet.servers], "The servers of this run")
    ui.table("server-starts", [{k: str(v)[:300] for k, v in r.items()} for r in fleet.records], "Every attempt")
    return fleet


@task(name="thinking canary", persist_result=False, cache_policy=NO_CACHE)
async def thinking_canary(
    servers: Sequence[Server], target: TargetText, sampling: SamplingSettings, serving: ServingSettings
) -> GateReport:
    """One prompt a server: thinking in its field, closed, an answer, and token ids."""
    report = await ask_canary(servers, target, sampling, serving.thinking_gate)
    ui.gate(report)
    return report


@task(name="MTP gate", persist_result=False, cache_policy=NO_CACHE)
async def mtp_gate(fleet: Fleet, serving: ServingSettings, target: TargetSettings) -> GateReport:
    """Is speculation on, and does it pay? Also reports parity where a reference was taken."""
    if fleet.parity_reference:
        ui.gate(await asyncio.to_thread(compare, fleet.servers, fleet.parity_reference, serving.mtp))
    report = await asyncio.to_thread(probe_mtp, fleet.servers, serving.mtp, target.mtp, fleet.plain_tok_s)
    ui.gate(report)
    return report


def _row(server: Server) -> dict[str, Any]:
    shown = ("name", "base_url", "engine", "version", "model", "max_running_requests", "context_tokens", "log_path")
    return {name: getattr(server, name) for name in shown}
