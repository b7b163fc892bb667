"""From evidence to a verdict: a pure function, no clock, no I/O.

Progress and throughput decide, power explains. Rules are tried in the order of the table in the design; every rule that
matches is a finding, the first one of the highest level is the verdict, the others are remarks. Power alone is critical
only for a hung or hardware-throttled GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tasks.power.codes import NEXT_STEPS, Code
from tasks.power.evidence import Evidence
from tasks.power.rules import RULES, Finding, low, power_side
from tasks.records import Expectation, Level

__all__ = ["Code", "Finding", "Judgement", "facts", "judge"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one server, the evidence it used, and what to look at next."""

    server: str
    code: Code
    level: Level
    summary: str
    findings: tuple[Finding, ...]
    expectations: tuple[Expectation, ...]
    next_steps: tuple[str, ...]
    evidence: dict[str, Any]

    @property
    def hung(self) -> bool:
        """Whether the server must be restarted."""
        return self.code in (Code.HUNG_PARKED, Code.HUNG_SPINNING)

    @property
    def remarks(self) -> tuple[Finding, ...]:
        """What else was found."""
        return tuple(finding for finding in self.findings if finding.code is not self.code)


def judge(evidence: Evidence) -> Judgement:
    """The verdict on one server. Never raises on missing evidence: what is not there is not held against anybody."""
    findings = [finding for rule in RULES for finding in rule(evidence)]
    critical = [f for f in findings if f.level is Level.CRITICAL]
    warnings = [f for f in findings if f.level is Level.WARNING]
    blind = _blind(evidence)
    if critical:
        chosen = critical[0]
    elif blind:
        chosen = Finding(Code.UNKNOWN, Level.UNKNOWN, blind)
        findings.insert(0, chosen)
    elif warnings:
        chosen = warnings[0]
    else:
        chosen = _sound(evidence)
        findings.insert(0, chosen)
    return Judgement(
        server=evidence.job.server,
        code=chosen.code,
        level=chosen.level,
        summary=chosen.message,
        findings=tuple(findings),
        expectations=tuple(_expectations(evidence, findings)),
        next_steps=NEXT_STEPS[chosen.code],
        evidence=facts(evidence),
    )


def _blind(evidence: Evidence) -> str | None:
    """Row 0: why power says nothing here, or None."""
    if evidence.stats:
        return None
    reasons = sorted({gpu.unsupported for gpu in evidence.gpus if gpu.unsupported})
    if reasons:
        return "; ".join(reasons)
    return "no power readings" if evidence.gpus else "no NVIDIA GPU can be read for this server"


def _sound(evidence: Evidence) -> Finding:
    expected, service = evidence.expected, evidence.service
    if expected is None:
        return Finding(Code.UNCALIBRATED, Level.OK, "no hard rule fires; there is no baseline to compare with yet")
    if service.tok_s is None:
        return Finding(Code.UNKNOWN, Level.UNKNOWN, "tokens per second were not measured: nothing to compare")
    return Finding(
        Code.HEALTHY,
        Level.OK,
        f"{service.tok_s:.0f} tok/s against {expected.tok_s:.0f} ± {expected.tok_s_band:.0%} when known good"
        + (f", {evidence.power_w:.0f} W a GPU" if evidence.power_w is not None else ""),
    )


def _expectations(evidence: Evidence, findings: list[Finding]) -> Iterator[Expectation]:
    """The checked statements, passed or not, with the numbers."""
    service, expected = evidence.service, evidence.expected
    hang = next((f for f in findings if "stalled_s" in f.details), None)
    progress = hang.message if hang else f"last sign of progress {service.stalled_s:.0f} s ago"
    yield Expectation("progress", hang is None, progress, hang.level if hang else Level.CRITICAL)
    yield _from(findings, "no hardware throttling", (Code.HW_THROTTLED,), "no hardware slowdown seen")
    said = f"speculation {service.speculation}, acceptance {_number(service.accept_length)}"
    yield _from(findings, "speculation", (Code.SPECULATION_OFF, Code.ACCEPTANCE_COLLAPSE), said)
    yield _from(findings, "temperature", (Code.THERMAL_LIMITED,), "no thermal limit seen")
    yield _from(findings, "power limit", (Code.LIMIT_CHANGED,), "as known, or the board's default")
    if expected is None:
        return
    rate = f"{_number(service.tok_s)} tok/s, {expected.tok_s:.1f} ± {expected.tok_s_band:.0%} when known good"
    yield Expectation("tokens per second", not low(evidence), rate)
    watts = f"{_number(evidence.power_w)} W a GPU, {_number(expected.power_w)} ± {expected.power_band:.0%} known good"
    yield Expectation("power", power_side(evidence) == 0, watts, Level.WARNING)
    for name, (then, now) in (expected.changed or {}).items():
        yield Expectation(f"unchanged: {name}", False, f"{then} when known good, {now} now", Level.WARNING)


def _from(findings: list[Finding], name: str, codes: tuple[Code, ...], otherwise: str) -> Expectation:
    found = next((f for f in findings if f.code in codes), None)
    if found is None:
        return Expectation(name, True, otherwise)
    return Expectation(name, False, found.message, found.level, {"verdict": found.code.value, **found.details})


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def facts(evidence: Evidence) -> dict[str, Any]:
    """The numbers a person would ask for, JSON-able."""
    service = evidence.service
    return {
        "concurrency": evidence.job.concurrency,
        "running": service.running,
        "queued": service.queued,
        "kv_usage": service.kv_usage,
        "tok_s": service.tok_s,
        "accept_length": service.accept_length,
        "speculation": service.speculation,
        "power_w_per_gpu": evidence.power_w,
        "idle_w_per_gpu": evidence.idle_w,
        "j_per_token": evidence.j_per_token,
        "gpus": [
            {
                "uuid": s.gpu_uuid,
                "mean_w": s.mean_w,
                "p10_w": s.p10_w,
                "p90_w": s.p90_w,
                "coverage": s.coverage,
                "enforced_limit_w": s.enforced_limit_w,
                "default_limit_w": s.default_limit_w,
                "fraction_of_enforced_limit": s.fraction_of_enforced_limit,
                "dynamic_fraction": s.dynamic_fraction(evidence.idle_w),
                "sm_clock_mhz": s.sm_clock_mhz,
                "temperature_c": s.temperature_c,
                "utilization": s.utilization,
                "counter_trusted": s.counter_trusted,
                "reasons": dict(s.reason_shares),
            }
            for s in evidence.stats
        ],
    }
