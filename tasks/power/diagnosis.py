"""`regen diagnose`: look at a running server under load, first with counters, then with a short profile."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tasks.errors import ServerError
from tasks.power.evidence import Evidence, Expected, gpu_evidence, service_evidence
from tasks.power.hypotheses import Hypothesis, Observed, Status, examine
from tasks.power.kernels import Profile
from tasks.power.probe import SETTLE_S, Load, loading, spread
from tasks.power.profiling import record_trace, summarize_files
from tasks.power.readings import Activity
from tasks.power.rig import Rig
from tasks.power.verdict import Judgement, judge
from tasks.records import Server, ServiceSample

IDLE_LOAD = 8
"""Requests sent to a server that has nothing to do: an idle server cannot be diagnosed."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found about one server."""

    server: Server
    judgement: Judgement
    hypotheses: tuple[Hypothesis, ...]
    profile: Profile | None
    profile_problem: str
    activity: Mapping[str, float | None]
    own_load: int
    seconds: float

    @property
    def supported(self) -> list[str]:
        """Names of the supported causes."""
        return [h.name for h in self.hypotheses if h.status is Status.SUPPORTED]

    def rows(self) -> list[dict[str, str]]:
        """The hypothesis table."""
        return [
            {
                "status": h.status.value,
                "cause": h.name,
                "question": h.question,
                "evidence": h.evidence,
                "next": h.next_step,
            }
            for h in self.hypotheses
        ]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        profile = None if self.profile is None else asdict(self.profile)
        return {
            "server": self.server.name,
            "url": self.server.base_url,
            "verdict": self.judgement.code.value,
            "summary": self.judgement.summary,
            "supported": self.supported,
            "hypotheses": self.rows(),
            "profile": profile,
            "profile_problem": self.profile_problem,
            "activity": dict(self.activity),
            "evidence": self.judgement.evidence,
            "own_load": self.own_load,
            "seconds": self.seconds,
        }


async def diagnose(
    rig: Rig,
    server: Server,
    *,
    folder: Path | None,
    seconds: float = 10.0,
    steps: int = 20,
    load: int | None = None,
    expected: Expected | None = None,
    profile_timeout_s: float = 120.0,
) -> Diagnosis:
    """Examine `server`. `folder` takes the trace (None: no profile); `load` is our own requests in flight (None: only
    when the server is idle; 0: never). Counters are read before the profiler, which disturbs them.
    """
    first = await rig.read_service(server)
    own = load if load is not None else (0 if first.running or first.queued else IDLE_LOAD)
    async with _maybe_loading(rig, server, own) as ours:
        began_s = time.time()
        samples, activity = await _watch(rig, server, seconds)
        end_s = time.time()
        profile, problem = await _profile(server, folder, steps, profile_timeout_s)
    concurrency = own or max((s.running or 0) + (s.queued or 0) for s in samples)
    # Our own answers are counted exactly, and only now: leaving the block told how far each had come.
    tok_s = spread(ours.answers, began_s, end_s) if ours is not None else None
    evidence = _evidence(rig, server, samples, (began_s, end_s), activity, concurrency, expected, tok_s)
    observed = Observed(
        evidence=evidence,
        infos=rig.described(server),
        activity=activity,
        profile=profile,
        profile_problem=problem,
        arguments=server.arguments,
        slots=server.max_running_requests,
    )
    names = ("sm", "tensor", "dram", "pcie_rx_mb_s", "pcie_tx_mb_s", "nvlink_rx_mb_s", "nvlink_tx_mb_s")
    return Diagnosis(
        server=server,
        judgement=judge(evidence),
        hypotheses=tuple(examine(observed)),
        profile=profile,
        profile_problem=problem,
        activity={name: observed.mean(name) for name in names},
        own_load=own,
        seconds=end_s - began_s,
    )


@contextlib.asynccontextmanager
async def _maybe_loading(rig: Rig, server: Server, concurrency: int) -> AsyncIterator[Load | None]:
    if concurrency <= 0:
        yield None
        return
    async with loading(server, concurrency, rig.settings.probe_output_tokens, rig.client_factory) as load:
        await asyncio.sleep(SETTLE_S)
        yield load


async def _watch(rig: Rig, server: Server, seconds: float) -> tuple[list[ServiceSample], list[Activity]]:
    """Counters of the server and of its GPUs, twice a second."""
    samples: list[ServiceSample] = []
    activity: list[Activity] = []
    until_s = time.time() + seconds
    while time.time() < until_s or len(samples) < 2:
        samples.append(replace(await rig.read_service(server), time_s=time.time()))
        sensor = rig.sampler.sensor
        for uuid in rig.gpus(server) if sensor is not None else ():
            found = await asyncio.to_thread(sensor.activity, uuid) if sensor is not None else None
            activity += [found] if found is not None else []
        await asyncio.sleep(0.5)
    return samples, activity


async def _profile(server: Server, folder: Path | None, steps: int, timeout_s: float) -> tuple[Profile | None, str]:
    if folder is None:
        return None, "no profile was asked for"
    if server.engine != "sglang":
        return None, f"{server.engine} has no /start_profile"
    try:
        paths = await record_trace(server, folder, steps=steps, timeout_s=timeout_s)
        profile = await asyncio.to_thread(summarize_files, paths)
    except ServerError as error:
        return None, str(error)
    return profile, "" if profile else "the trace holds no GPU work"


def _evidence(
    rig: Rig,
    server: Server,
    samples: Sequence[ServiceSample],
    span: tuple[float, float],
    activity: Sequence[Activity],
    concurrency: int,
    expected: Expected | None,
    tok_s: float | None,
) -> Evidence:
    latest = {a.gpu_uuid: a for a in activity}
    return Evidence(
        job=replace(rig.job(server, concurrency), workload="natural"),
        service=service_evidence(samples, arguments=server.arguments, tok_s=tok_s),
        gpus=gpu_evidence(rig.sampler.since(*span), rig.infos, rig.gpus(server), activity=latest),
        expected=expected,
    )


def write_diagnosis(diagnosis: Diagnosis, path: Path) -> None:
    """Keep the diagnosis as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(diagnosis.as_dict(), indent=1, default=str) + "\n", encoding="utf-8")
