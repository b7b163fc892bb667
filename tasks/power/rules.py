"""The rules of the verdict table, one function a row: each yields what it finds in the evidence, or nothing.

A threshold is a named constant with its reason. "Low" and "high" are against the band of the baseline; without one no
server is low, and only the hard rules (hung, hardware slowdown, speculation absent) can be critical.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tasks.power.codes import Code
from tasks.power.evidence import Evidence
from tasks.power.statistics import PowerStats
from tasks.records import Level

STALL_S = 20.0
"""Seconds without progress that are a hang, unless ten times the usual time between tokens is longer."""
STALL_ITL = 10.0
NEAR_IDLE = 1.25
"""Mean watts ÷ warm idle watts up to which a card counts as parked."""
PARKED_DYNAMIC = 0.10
"""The same as a share of the room between idle and limit."""
BUSY_UTILIZATION = 0.9
HW_SHARE = 0.01
"""Share of the window under hardware slowdown that counts: single counts happen on healthy boards."""
HW_SHARE_ALONE = 0.10
"""Without a baseline nothing says whether tokens suffer; above this share it is certain that they do."""
SW_THERMAL_SHARE = 0.05
LIMIT_TOLERANCE_W = 1.0
FULL_KV = 0.95
RUNNING_SHARE = 0.9
"""Mean running ÷ wanted below which requests are not reaching the GPU."""
STRAGGLER_OFF = 0.15
AT_LIMIT = 0.95
COLLAPSED_ACCEPT = 0.5
"""Share of the baseline's accepted drafts (length - 1) below which acceptance has collapsed (same probe only)."""
LINK_BUSY_MB_S = 10_000.0
"""Traffic a direction of one GPU that a PCIe 4 x16 link (about 25 GB/s) carries only when busy."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule that matched."""

    code: Code
    level: Level
    message: str
    details: dict[str, Any] = field(default_factory=dict)


def low(evidence: Evidence) -> bool:
    """Tokens per second below the band. Without a baseline nothing is low."""
    expected, tok_s = evidence.expected, evidence.service.tok_s
    return expected is not None and tok_s is not None and tok_s < expected.tok_s * (1 - expected.tok_s_band)


def high(evidence: Evidence) -> bool:
    """Tokens per second above the band: better than known good."""
    expected, tok_s = evidence.expected, evidence.service.tok_s
    return expected is not None and tok_s is not None and tok_s > expected.tok_s * (1 + expected.tok_s_band)


def power_side(evidence: Evidence) -> int:
    """-1 below the power band, 0 in it (or unknown), 1 above it."""
    expected, power_w = evidence.expected, evidence.power_w
    if expected is None or expected.power_w is None or power_w is None:
        return 0
    off = power_w / expected.power_w - 1
    return 0 if abs(off) <= expected.power_band else (1 if off > 0 else -1)


def hung(evidence: Evidence) -> Iterator[Finding]:
    """Rows 1 and 2: requests in flight and no progress; parked at idle power, or spinning above it."""
    service = evidence.service
    patience_s = max(STALL_S, STALL_ITL * _itl_s(evidence))
    if not service.in_flight or service.stalled_s <= patience_s:
        return
    text = f"{service.in_flight:.0f} in flight, no progress for {service.stalled_s:.0f} s (allowed {patience_s:.0f} s)"
    if not evidence.stats:
        text = f"{text}; power unknown, so parked or spinning cannot be told"
        yield Finding(Code.UNKNOWN, Level.WARNING, text, {"stalled_s": service.stalled_s})
        return
    parked = _near_idle(evidence)
    code = Code.HUNG_PARKED if parked else Code.HUNG_SPINNING
    how = "at idle power" if parked else "while the GPU is busy (a collective or kernel that does not end)"
    yield Finding(code, Level.CRITICAL, f"{text} {how}, {evidence.power_w:.0f} W", {"stalled_s": service.stalled_s})


def _itl_s(evidence: Evidence) -> float:
    """Usual seconds between tokens of one request: concurrency ÷ tokens per second when known good."""
    expected = evidence.expected
    return evidence.job.concurrency / expected.tok_s if expected and expected.tok_s > 0 else 0.0


def _near_idle(evidence: Evidence) -> bool:
    idle_w = evidence.idle_w
    if idle_w is None:
        return all((s.utilization or 0.0) < 0.5 for s in evidence.stats)
    return all(
        s.mean_w <= NEAR_IDLE * idle_w or (s.dynamic_fraction(idle_w) or 0.0) <= PARKED_DYNAMIC for s in evidence.stats
    )


def hw_throttled(evidence: Evidence) -> Iterator[Finding]:
    """Row 3: hardware slowdown for > 1 % of the window with tokens below the band; alone only when it is long."""
    worst = _worst(evidence, lambda s: s.hw_slowdown_share)
    if worst is None or worst[1] <= HW_SHARE:
        return
    uuid, share = worst
    critical = low(evidence) if evidence.expected else share > HW_SHARE_ALONE
    text = f"{uuid}: {share:.1%} of the window under hardware slowdown (temperature or power brake)"
    yield Finding(Code.HW_THROTTLED, Level.CRITICAL if critical else Level.WARNING, text, {"share": share})


def speculation_off(evidence: Evidence) -> Iterator[Finding]:
    """Row 12a, whatever the watts: MTP asked for (or there when known good, and tokens are low) and absent."""
    service, expected = evidence.service, evidence.expected
    if service.speculation != "off":
        return
    before = expected is not None and expected.speculation == "on" and low(evidence)
    if evidence.job.mtp_wanted or before:
        why = "MTP was asked for" if evidence.job.mtp_wanted else "MTP was on when this job was known good"
        text = f"{why}, but the server runs without speculation"
        if expected and service.tok_s:
            text += f" ({service.tok_s:.0f} tok/s against {expected.tok_s:.0f})"
        yield Finding(Code.SPECULATION_OFF, Level.CRITICAL, text)


def acceptance_collapse(evidence: Evidence) -> Iterator[Finding]:
    """Row 12b, whatever the watts: speculation runs, but (almost) nothing is accepted."""
    service, expected, job = evidence.service, evidence.expected, evidence.job
    accept = service.accept_length
    if service.speculation != "on" or accept is None or not service.running:
        return
    least, why = job.min_accept_length, f"at least {job.min_accept_length:.2f} is wanted"
    if expected and expected.accept_length and job.workload == "probe":
        known = 1 + COLLAPSED_ACCEPT * (expected.accept_length - 1)
        if known > least:
            least, why = known, f"it was {expected.accept_length:.2f} when known good"
    if accept < least:
        text = f"acceptance length {accept:.2f} (1.0 = nothing accepted); {why}"
        yield Finding(Code.ACCEPTANCE_COLLAPSE, Level.CRITICAL, text, {"accept_length": accept, "least": least})


def thermal_limited(evidence: Evidence) -> Iterator[Finding]:
    """Row 4: software thermal slowdown for > 5 % of the window; critical only when tokens suffer."""
    worst = _worst(evidence, _sw_thermal)
    if worst is None or worst[1] <= SW_THERMAL_SHARE:
        return
    level = Level.CRITICAL if low(evidence) else Level.WARNING
    yield Finding(Code.THERMAL_LIMITED, level, f"{worst[0]}: {worst[1]:.0%} of the window thermally limited")


def _sw_thermal(stats: PowerStats) -> float | None:
    counted = stats.sw_thermal_share
    return counted if counted is not None else stats.reason_shares.get("SW_THERMAL")


def limit_changed(evidence: Evidence) -> Iterator[Finding]:
    """Row 5: the enforced limit is not the baseline's; without a baseline, not the board's default."""
    expected = evidence.expected
    for stats in evidence.stats:
        enforced = stats.enforced_limit_w
        known = expected.enforced_limit_w if expected and expected.enforced_limit_w else stats.default_limit_w
        if enforced is None or known is None or abs(enforced - known) <= LIMIT_TOLERANCE_W:
            continue
        whose = "when known good" if expected and expected.enforced_limit_w else "the board's default"
        level = Level.CRITICAL if low(evidence) and enforced < known else Level.WARNING
        text = f"{stats.gpu_uuid}: enforced power limit {enforced:.0f} W, {known:.0f} W {whose}"
        yield Finding(Code.LIMIT_CHANGED, level, text, {"enforced_limit_w": enforced, "known_w": known})


def starved(evidence: Evidence) -> Iterator[Finding]:
    """Row 8: tokens low because requests do not run: memory full, slots short, or nobody sends them."""
    service, job = evidence.service, evidence.job
    if not low(evidence) or service.running is None or service.running >= RUNNING_SHARE * job.concurrency:
        return
    text = f"{service.running:.0f} of {job.concurrency} requests running, {service.queued or 0:.0f} queued"
    if (service.kv_usage or 0.0) >= FULL_KV or service.retractions > 0:
        full = f"{text}; KV or state memory {service.kv_usage or 0:.0%} full, {service.retractions:.0f} retractions"
        yield Finding(Code.KV_FULL, Level.CRITICAL, full)
    else:
        who = "the server does not admit them" if service.queued else "the client does not send enough"
        yield Finding(Code.SCHEDULER_STARVED, Level.CRITICAL, f"{text}: {who}")


def underfed(evidence: Evidence) -> Iterator[Finding]:
    """Rows 9 and 10: all requests run, tokens and watts are low: launches (one GPU) or communication (several)."""
    service, job = evidence.service, evidence.job
    running = service.running is None or service.running >= RUNNING_SHARE * job.concurrency
    if not (low(evidence) and power_side(evidence) < 0 and running):
        return
    if job.tensor_parallel == 1 or service.graphs_disabled:
        why = "CUDA graphs are off" if service.graphs_disabled else "the GPU waits for its host (graphs, CPU, client)"
        yield Finding(Code.LAUNCH_BOUND, Level.CRITICAL, f"tokens and watts below the baseline: {why}")
    elif not list(odd_gpus(evidence)) or _link_busy(evidence):
        yield Finding(
            Code.COMM_BOUND, Level.CRITICAL, "tokens and watts below the baseline on every GPU of the group alike"
        )


def _link_busy(evidence: Evidence) -> bool:
    seen = [gpu.activity for gpu in evidence.gpus if gpu.activity]
    rates = [rate or 0.0 for a in seen for rate in (a.pcie_rx_mb_s, a.pcie_tx_mb_s)]
    return max(rates, default=0.0) > LINK_BUSY_MB_S


def odd_gpus(evidence: Evidence) -> Iterator[tuple[str, float, str]]:
    """(uuid, relative difference, what) of each GPU > 15 % off its group's median in power or SM clock."""
    if len(evidence.stats) < 2:
        return
    for what in ("mean_w", "sm_clock_mhz"):
        values = sorted(value for s in evidence.stats if (value := getattr(s, what)) is not None)
        if len(values) < 2:
            continue
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        for stats in evidence.stats:
            value = getattr(stats, what)
            if value is not None and middle > 0 and abs(value / middle - 1) > STRAGGLER_OFF:
                yield stats.gpu_uuid, value / middle - 1, "power" if what == "mean_w" else "SM clock"


def straggler(evidence: Evidence) -> Iterator[Finding]:
    """Row 11. Critical only when tokens are low; attention data parallelism is uneven by design."""
    if evidence.job.dp_attention:
        return
    odd = list(odd_gpus(evidence))
    if not odd or (evidence.expected is not None and not low(evidence)):
        return
    uuid, off, what = max(odd, key=lambda item: abs(item[1]))
    level = Level.CRITICAL if low(evidence) else Level.WARNING
    yield Finding(Code.STRAGGLER, level, f"{uuid}: {what} {off:+.0%} from its group's median", {"off": off})


def inefficient(evidence: Evidence) -> Iterator[Finding]:
    """Tokens low with watts above the band: the GPU works, but not on these tokens."""
    if low(evidence) and power_side(evidence) > 0:
        now, then = evidence.j_per_token, evidence.expected.j_per_token if evidence.expected else None
        joules = f": {now:.3f} J/token, {then:.3f} when known good" if now and then else ""
        yield Finding(Code.INEFFICIENT, Level.CRITICAL, f"fewer tokens for more watts{joules}")


def workload_drift(evidence: Evidence) -> Iterator[Finding]:
    """Row 13: tokens low, watts as known, acceptance fine: other work than the baseline's."""
    if low(evidence) and power_side(evidence) == 0:
        expected = evidence.expected
        assert expected is not None
        text = f"{evidence.service.tok_s:.0f} tok/s against {expected.tok_s:.0f} at the known power"
        yield Finding(Code.WORKLOAD_DRIFT, Level.WARNING, text)


def power_anomaly(evidence: Evidence) -> Iterator[Finding]:
    """Row 14: tokens in their band, watts not. Only ever a warning; better tokens excuse any watts."""
    expected, power_w = evidence.expected, evidence.power_w
    if expected is None or expected.power_w is None or power_w is None or low(evidence) or high(evidence):
        return
    if evidence.service.tok_s is not None and power_side(evidence) != 0:
        text = f"{power_w:.0f} W a GPU, {expected.power_w:.0f} ± {expected.power_band:.0%} when known good; tokens fine"
        yield Finding(Code.POWER_ANOMALY, Level.WARNING, text)


def remarks(evidence: Evidence) -> Iterator[Finding]:
    """Row 6 and better-than-known: nothing that anybody must act on."""
    for stats in evidence.stats:
        fraction, capped = stats.fraction_of_enforced_limit, stats.sw_power_share
        capped = capped if capped is not None else stats.reason_shares.get("SW_POWER_CAP")
        if fraction is not None and fraction >= AT_LIMIT and (capped or 0.0) > HW_SHARE:
            text = f"{stats.gpu_uuid}: at {fraction:.0%} of its enforced limit, as at saturation"
            yield Finding(Code.POWER_LIMITED, Level.OK, text, {"sw_power_cap_share": capped})
    if high(evidence):
        expected = evidence.expected
        assert expected is not None
        text = f"{evidence.service.tok_s:.0f} tok/s, {expected.tok_s:.0f} when known good"
        yield Finding(Code.FASTER, Level.OK, text)


RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    hung,
    hw_throttled,
    speculation_off,
    acceptance_collapse,
    thermal_limited,
    limit_changed,
    starved,
    underfed,
    straggler,
    inefficient,
    workload_drift,
    power_anomaly,
    remarks,
)


def _worst(evidence: Evidence, share: Callable[[PowerStats], float | None]) -> tuple[str, float] | None:
    found = [(s.gpu_uuid, value) for s in evidence.stats if (value := share(s)) is not None]
    return max(found, key=lambda item: item[1]) if found else None
