"""The power gate: hard rules before calibration, the baseline's band after it. Both put a fixed probe on the servers.

Without an NVIDIA GPU nothing is loaded and the report is UNKNOWN, which passes. What the servers themselves say (MTP
asked for and absent) still counts.
"""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.errors import StorageError
from tasks.power.baseline import Baselines, build, compared_fields, expected_from, not_known_good
from tasks.power.codes import NEXT_STEPS, Code
from tasks.power.evidence import Evidence, Expected, gpu_evidence, service_evidence
from tasks.power.probe import ProbeResult, run_probe
from tasks.power.rig import Rig, at_rest, idle_watts
from tasks.power.statistics import by_gpu, summarize, window_problems
from tasks.power.verdict import Judgement, judge
from tasks.records import Expectation, GateReport, Level, Server

HARD_CONCURRENCY = 4
HARD_SECONDS = 12.0
"""Enough for progress, acceptance and throttling to show; tokens per second are not judged by the hard rules."""
UNEVEN = 0.15
BAD = (Level.CRITICAL, Level.WARNING)
ORDER = (Level.CRITICAL, Level.WARNING, Level.UNKNOWN, Level.OK)


@dataclass(frozen=True, slots=True)
class _Measured:
    server: Server
    probe: ProbeResult
    idle_w: Mapping[str, float]
    expected: Expected | None
    evidence: Evidence
    judgement: Judgement


async def hard_rules(rig: Rig) -> GateReport:
    """Is anything hung, throttled or plainly off? A short, light probe of every server at once, no baseline."""
    if not rig.can_judge:
        return await _without_power(rig, "power_hard_rules")
    idle_w, quiet = await _idle(rig)
    measured = await _measure(rig, dict.fromkeys((s.name for s in rig.servers), HARD_CONCURRENCY), HARD_SECONDS, idle_w)
    return _report("power_hard_rules", rig, measured, quiet)


async def baseline_gate(
    rig: Rig, limits: Mapping[str, int], baselines: Baselines, *, hard_rules_passed: bool = True
) -> GateReport:
    """At the chosen requests in flight: as fast as when it was known good, and do the watts explain it?

    Without a baseline the verdict is UNCALIBRATED, and one is written when the run is known good. `limits` is requests
    in flight by server name.
    """
    if not rig.can_judge:
        return await _without_power(rig, "power_baseline")
    notes: list[Expectation] = []
    expected = {server.name: _expected(rig, server, limits[server.name], baselines, notes) for server in rig.servers}
    idle_w, quiet = await _idle(rig)
    measured = await _measure(rig, limits, rig.settings.probe_s, idle_w, expected)
    if rig.settings.accept_baseline:
        notes += _write(rig, measured, baselines, hard_rules_passed)
    return _report("power_baseline", rig, measured, [*quiet, *notes, *_even(measured)])


async def _measure(
    rig: Rig,
    limits: Mapping[str, int],
    seconds: float,
    idle_w: Mapping[str, float],
    expected: Mapping[str, Expected | None] | None = None,
) -> list[_Measured]:
    """Probe all servers at the same time: a neighbour's heat and the host's CPU are part of the truth."""
    probes = await asyncio.gather(
        *(
            run_probe(
                server,
                limits[server.name],
                seconds=seconds,
                output_tokens=rig.settings.probe_output_tokens,
                read_service=rig.read_service,
                client_factory=rig.client_factory,
            )
            for server in rig.servers
        )
    )
    found = []
    for server, probe in zip(rig.servers, probes, strict=True):
        known = (expected or {}).get(server.name)
        evidence = rig.evidence(server, probe, (probe.start_s, probe.end_s), idle_w, known)
        evidence = replace(evidence, service=_with_whole_stall(evidence, probe))
        found.append(_Measured(server, probe, idle_w, known, evidence, judge(evidence)))
    return found


def _with_whole_stall(evidence: Evidence, probe: ProbeResult) -> Any:
    """A stall may have begun before the window: look at every reading of the probe."""
    whole = service_evidence([s for s in probe.service if s.time_s <= probe.end_s])
    return replace(evidence.service, stalled_s=max(evidence.service.stalled_s, whole.stalled_s))


async def _idle(rig: Rig) -> tuple[dict[str, float], list[Expectation]]:
    """Warm idle watts by GPU, and whether a rank spins at rest. Nothing when a server has work already."""
    samples = [await rig.read_service(server) for server in rig.servers]
    if rig.settings.idle_s <= 0 or not all(at_rest(sample) for sample in samples):
        return {}, []
    start_s = time.time()
    await asyncio.sleep(rig.settings.idle_s)
    readings = rig.sampler.since(start_s)
    found = []
    for uuid, own in by_gpu(readings).items():
        stats = summarize(own)
        if stats is not None and (stats.utilization or 0.0) >= 0.9:
            # Sound servers were seen at 100 % at rest: worth a look, never a reason to stop.
            text = f"{uuid} is {stats.utilization:.0%} busy at {stats.mean_w:.0f} W without a request: a spinning rank?"
            found.append(Expectation("quiet at rest", False, text, Level.WARNING))
    return idle_watts(readings), found


def _expected(
    rig: Rig, server: Server, concurrency: int, baselines: Baselines, notes: list[Expectation]
) -> Expected | None:
    try:
        baseline = baselines.read(rig.key(server, concurrency))
    except StorageError as error:
        notes.append(Expectation("baseline readable", False, str(error), Level.WARNING))
        return None
    if baseline is None:
        return None
    settings = rig.settings
    return expected_from(
        baseline, _compared(rig, server), same_board=settings.band_same_board, other_board=settings.band_other_board
    )


def _compared(rig: Rig, server: Server) -> dict[str, Any]:
    speculation = service_evidence([], arguments=server.arguments).speculation
    return compared_fields(rig.described(server), server.arguments, speculation, server.version)


def _write(rig: Rig, measured: Sequence[_Measured], baselines: Baselines, passed: bool) -> list[Expectation]:
    """Write a baseline for every server that has none and is known good; one for servers of the same job."""
    notes, done = [], set()
    for one in measured:
        key = rig.key(one.server, one.probe.concurrency)
        if one.expected is not None or key in done:
            continue
        problems = [p for s in one.evidence.stats for p in window_problems(s, rig.rules)]
        if not one.probe.reached:
            problems.append(f"the server never ran {one.probe.concurrency} requests")
        # A limit below the board's default is a fact to keep with the baseline, not a fault.
        wrong = [f for f in one.judgement.findings if f.level in BAD and f.code is not Code.LIMIT_CHANGED]
        reasons = not_known_good(one.evidence, problems, passed and not wrong)
        windows = [rig.evidence(one.server, one.probe, span, one.idle_w) for span in one.probe.spans]
        baseline = None if reasons else build(key, windows, one.evidence, _compared(rig, one.server))
        if baseline is None:
            text = "; ".join(reasons) or "fewer than three windows gave tokens per second"
            notes.append(Expectation("baseline written", False, f"{one.server.name}: {text}", Level.WARNING))
            continue
        try:
            where = str(baselines.write(baseline))
        except StorageError as error:
            notes.append(Expectation("baseline written", False, str(error), Level.WARNING))
            continue
        done.add(key)
        details = {"path": where, "key": key.text}
        notes.append(Expectation("baseline written", True, f"{one.server.name}: {key.text}", Level.OK, details))
    return notes


def _even(measured: Sequence[_Measured]) -> list[Expectation]:
    """Servers of the same job do the same: one > 15 % below the fleet's median is named."""
    rates = {m.server.name: m.evidence.service.tok_s for m in measured if m.evidence.service.tok_s}
    if len(rates) < 3 or len({m.probe.concurrency for m in measured}) > 1:
        return []
    middle = statistics.median(rate for rate in rates.values() if rate)
    slow = {name: rate for name, rate in rates.items() if rate and rate < middle * (1 - UNEVEN)}
    text = ", ".join(f"{name} {rate:.0f} tok/s" for name, rate in slow.items()) or "all servers alike"
    level = Level.WARNING
    return [Expectation("even fleet", not slow, f"{text}; median {middle:.0f} tok/s", level, {"verdict": "STRAGGLER"})]


async def _without_power(rig: Rig, gate: str) -> GateReport:
    """No watts: one reading of each server's counters, so that what it says itself still counts."""
    judgements = []
    for server in rig.servers:
        sample = await rig.read_service(server)
        service = service_evidence([sample], arguments=server.arguments)
        gpus = gpu_evidence([], rig.infos, rig.gpus(server))
        judgements.append(judge(Evidence(rig.job(server, HARD_CONCURRENCY), service, gpus)))
    if not judgements:
        return GateReport(gate, Code.UNKNOWN, Level.UNKNOWN, rig.settings.gate, "no server to judge")
    return summed(gate, rig.settings.gate, judgements)


def _report(gate: str, rig: Rig, measured: Sequence[_Measured], notes: Sequence[Expectation]) -> GateReport:
    report = summed(gate, rig.settings.gate, [one.judgement for one in measured])
    dead = [m for m in measured if not m.probe.answers and m.probe.failures and not m.judgement.hung]
    extra = [
        Expectation("answers", False, f"{m.server.name}: {dict(m.probe.failures)}, last: {m.probe.last_failure}")
        for m in dead
    ]
    extra += [
        Expectation("steady window", False, f"{m.server.name}: {problem}", Level.WARNING)
        for m in measured
        if m.expected is not None
        for stats in m.evidence.stats
        for problem in window_problems(stats, rig.rules)
    ]
    keys = {m.server.name: rig.key(m.server, m.probe.concurrency).text for m in measured}
    windows = {m.server.name: [m.probe.start_s, m.probe.end_s] for m in measured}
    report = replace(
        report,
        expectations=(*report.expectations, *notes, *extra),
        details={**report.details, "windows": windows, "baseline_keys": keys},
    )
    if dead and report.level is not Level.CRITICAL:
        summary = "; ".join(f"{m.server.name} answered none of the probe's requests" for m in dead)
        return replace(report, verdict=Code.SCHEDULER_STARVED.value, level=Level.CRITICAL, summary=summary)
    return report


def summed(gate: str, mode: Any, judgements: Sequence[Judgement]) -> GateReport:
    """One report for a fleet: the worst server's verdict, everybody's evidence."""
    worst = min(judgements, key=lambda j: ORDER.index(j.level))
    alone = len(judgements) == 1
    alike = [j.server for j in judgements if j.code is worst.code]
    summary = worst.summary if alone else f"{', '.join(alike)}: {worst.summary}"
    expectations = [
        replace(e, name=e.name if alone else f"{j.server}: {e.name}") for j in judgements for e in j.expectations
    ]
    steps: list[str] = []
    for judgement in sorted(judgements, key=lambda j: ORDER.index(j.level)):
        if judgement.level in (Level.CRITICAL, Level.WARNING, Level.UNKNOWN):
            steps += [step for step in NEXT_STEPS[judgement.code] if step not in steps]
    return GateReport(
        gate=gate,
        verdict=worst.code.value,
        level=worst.level,
        mode=mode,
        summary=summary,
        expectations=tuple(expectations),
        next_steps=tuple(steps),
        details={
            "servers": {j.server: {"verdict": j.code.value, **j.evidence} for j in judgements},
            "remarks": [f"{j.server}: {f.code.value}: {f.message}" for j in judgements for f in j.remarks],
        },
    )
