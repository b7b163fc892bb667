"""Is speculation on, and does it pay? Arguments say what was asked for, the log what was captured, a probe what is
accepted.

Acceptance length counts the bonus token: 1.0 means that nothing was accepted, steps + 1 is the most.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tasks.provisioning.settings import MtpSettings
from tasks.provisioning.start import read_log
from tasks.provisioning.startup import read_facts
from tasks.provisioning.wire import call
from tasks.records import Expectation, GateReport, Level, Server

PROBE_PROMPTS = (
    "A train leaves at 9:40 and arrives at 13:05. It stops twice for 12 minutes each. How long does it move?",
    "Explain to a gardener why leaves turn red in autumn, and what that costs the tree.",
    "Write a Python function that merges two sorted lists, and say how you would test it.",
    "Which is larger, the number of seconds in a year or the number of days since the year 1? Think it through.",
)
"""Real thinking prompts: acceptance on a fixed string says little about acceptance on thinking."""
PROBE_TOKENS = 256
PROBE_TIMEOUT_S = 300.0
FULL_SHARE = 0.995
"""An acceptance this close to the most possible, for long, is not credible (it was seen just before illegal memory
access)."""
COLLAPSE_S = 120.0
SUSPICIOUS_S = 300.0


class Verdict(StrEnum):
    """What the evidence says about speculation."""

    ON_AND_EFFECTIVE = "ON_AND_EFFECTIVE"
    OFF = "OFF"
    INEFFECTIVE = "INEFFECTIVE"
    SUSPICIOUS = "SUSPICIOUS"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class MtpEvidence:
    """What was found out about one server. None: not told."""

    server: str
    engine: str
    algorithm: str | None = None
    steps: int | None = None
    draft_graphs: bool | None = None
    accept_length: float | None = None
    verify_steps: int | None = None
    probe_tokens: int = 0
    tok_s: float | None = None
    plain_tok_s: float | None = None
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MtpJudgement:
    """One server's verdict and its grounds."""

    verdict: Verdict
    level: Level
    message: str
    evidence: MtpEvidence


def judge(evidence: MtpEvidence, settings: MtpSettings, wanted: bool) -> MtpJudgement:
    """Pure: the verdict for one server. `wanted`: the run asked for MTP."""

    def found(verdict: Verdict, level: Level, message: str) -> MtpJudgement:
        return MtpJudgement(verdict, level, message, evidence)

    bad = Level.CRITICAL if wanted else Level.OK
    if evidence.engine != "sglang":
        level = Level.WARNING if wanted else Level.OK
        return found(Verdict.UNKNOWN, level, f"{evidence.engine} does not tell about speculation")
    length = evidence.accept_length
    if not evidence.algorithm and not length:
        return found(Verdict.OFF, bad, "the server runs without speculation")
    if length is None:
        why = "; ".join(evidence.errors) or "the server told no acceptance length"
        return found(Verdict.UNKNOWN, Level.WARNING if wanted else Level.OK, f"speculation is on, but {why}")
    most = (evidence.steps or settings.steps) + 1
    if length < settings.min_accept_length:
        text = f"acceptance length {length:.2f}, below {settings.min_accept_length}: drafting costs more than it brings"
        return found(Verdict.INEFFECTIVE, bad, text)
    if length >= FULL_SHARE * most and (evidence.verify_steps or 0) >= 64:
        text = f"acceptance length {length:.2f} of {most}: every draft accepted, which real text does not give"
        return found(Verdict.SUSPICIOUS, Level.WARNING, text)
    if evidence.plain_tok_s and evidence.tok_s and evidence.tok_s < evidence.plain_tok_s:
        text = f"{evidence.tok_s:.0f} tok/s with speculation, {evidence.plain_tok_s:.0f} without"
        return found(Verdict.INEFFECTIVE, bad, text)
    return found(Verdict.ON_AND_EFFECTIVE, Level.OK, f"acceptance length {length:.2f} of {most}")


def gather(server: Server, plain_tok_s: float | None = None, prompts: Sequence[str] = PROBE_PROMPTS) -> MtpEvidence:
    """Ask one server everything, and probe it with real thinking prompts. Never raises: trouble is evidence."""
    if server.engine != "sglang":
        return MtpEvidence(server.name, server.engine)
    info = call(f"{server.base_url}/server_info", api_key=server.api_key, timeout_s=30).object()
    arguments = {**server.arguments, **_arguments(info)}
    probe = _Probe()
    for prompt in prompts:
        probe.ask(server, prompt)
    told = info.get("internal_states") or [{}]
    length = probe.accept_length() or _told_length(server, told[0])
    log = read_log(Path(server.log_path)) if server.log_path else ""
    return MtpEvidence(
        server=server.name,
        engine=server.engine,
        algorithm=arguments.get("speculative_algorithm"),
        steps=arguments.get("speculative_num_steps"),
        draft_graphs=read_facts(log).draft_graphs if log else None,
        accept_length=length,
        verify_steps=probe.verify_steps or None,
        probe_tokens=probe.tokens,
        tok_s=probe.tok_s(),
        plain_tok_s=plain_tok_s,
        errors=tuple(probe.errors),
    )


@dataclass
class _Probe:
    tokens: int = 0
    verify_steps: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)

    def ask(self, server: Server, prompt: str) -> None:
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": PROBE_TOKENS,
            "temperature": 1.0,
            "chat_template_kwargs": {"enable_thinking": True},
            "return_meta_info": True,
        }
        began = time.monotonic()
        answer = call(f"{server.base_url}/v1/chat/completions", body, api_key=server.api_key, timeout_s=PROBE_TIMEOUT_S)
        if not answer.ok:
            self.errors.append(f"probe got {answer.status or answer.error}: {str(answer.body)[:120]}")
            return
        self.seconds += time.monotonic() - began
        value = answer.object()
        self.tokens += int((value.get("usage") or {}).get("completion_tokens") or 0)
        choices = value.get("choices") or [{}]
        meta: Mapping[str, Any] = choices[0].get("meta_info") or {}
        self.verify_steps += int(meta.get("spec_verify_ct") or 0)
        if meta.get("spec_accept_length"):
            self.lengths.append(float(meta["spec_accept_length"]))

    def accept_length(self) -> float | None:
        """Tokens a verify step over all probes; the mean of the answers' own lengths where steps are not told."""
        if self.verify_steps:
            return self.tokens / self.verify_steps
        return sum(self.lengths) / len(self.lengths) if self.lengths else None

    def tok_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 and self.tokens else None


def _arguments(info: Mapping[str, Any]) -> dict[str, Any]:
    source = info.get("server_args") if isinstance(info.get("server_args"), Mapping) else info
    assert source is not None
    return {name: source[name] for name in ("speculative_algorithm", "speculative_num_steps") if name in source}


def _told_length(server: Server, state: Mapping[str, Any]) -> float | None:
    """The server's own average, where an answer does not carry its length (before 0.5.13)."""
    fresh = call(f"{server.base_url}/server_info", api_key=server.api_key, timeout_s=30).object()
    states = fresh.get("internal_states") or [state]
    loads = call(f"{server.base_url}/v1/loads", api_key=server.api_key).object().get("loads") or [{}]
    value = (loads[0].get("speculative") or {}).get("accept_length") or states[0].get("avg_spec_accept_length")
    return float(value) if value else None


def mtp_gate(
    servers: Sequence[Server], settings: MtpSettings, wanted: bool = True, plain_tok_s: float | None = None
) -> GateReport:
    """Probe every server and judge the fleet by its worst. `plain_tok_s`: the same server without MTP, where known."""
    judged = [judge(gather(server, plain_tok_s), settings, wanted) for server in servers]
    return report(judged, settings, wanted)


def report(judged: Sequence[MtpJudgement], settings: MtpSettings, wanted: bool) -> GateReport:
    """The gate's report from each server's judgement."""
    order = [Level.CRITICAL, Level.WARNING, Level.UNKNOWN, Level.OK]
    worst = min(judged, key=lambda j: order.index(j.level)) if judged else None
    if worst is None:
        return GateReport("mtp", Verdict.UNKNOWN, Level.WARNING, settings.gate, "no server to ask")
    steps = {
        Verdict.OFF: ("start the server with speculation, or set target.mtp to false", "is mtp.* in the checkpoint?"),
        Verdict.INEFFECTIVE: ("is the draft head the target's own?", "look for a changed template or quantized head"),
        Verdict.SUSPICIOUS: ("read some answers: repeated text accepts everything", "is SGLANG_SIMULATE_ACC_LEN set?"),
    }
    asked = "MTP wanted" if wanted else "MTP not wanted"
    return GateReport(
        gate="mtp",
        verdict=worst.verdict,
        level=worst.level,
        mode=settings.gate,
        summary=f"{asked}; {worst.evidence.server}: {worst.message}",
        expectations=tuple(check for j in judged for check in _checks(j)),
        next_steps=steps.get(worst.verdict, ()) if worst.level is not Level.OK else (),
        details={j.evidence.server: {n: getattr(j.evidence, n) for n in MtpEvidence.__slots__} for j in judged},
    )


def _checks(judged: MtpJudgement) -> list[Expectation]:
    found, name = judged.evidence, judged.evidence.server
    checks = [Expectation(f"speculation on {name}", judged.level is Level.OK, judged.message, judged.level)]
    if found.draft_graphs is not None and found.algorithm:
        said = "in the log" if found.draft_graphs else "not in the log: drafting runs without graphs, slower"
        checks.append(Expectation(f"draft graphs on {name}", found.draft_graphs, said, Level.WARNING))
    return checks


class AcceptWatch:
    """Watches acceptance during the run: says once when it collapses or stays at the most possible, and when it
    recovers.

    Pure: time comes with the readings. Only readings with requests in flight count (the gauge holds its last value).
    """

    def __init__(self, settings: MtpSettings) -> None:
        self.floor, self.most = settings.min_accept_length, settings.steps + 1
        self._state, self._since = "", 0.0
        self._said = ""

    def observe(self, time_s: float, accept_length: float | None, running: int | None) -> dict[str, Any] | None:
        """An event for the run's record and the UI, or None."""
        if not running or not accept_length:
            return None
        low, full = accept_length < self.floor, accept_length >= FULL_SHARE * self.most
        state = "collapsed" if low else "suspicious" if full else "recovered"
        if state != self._state:
            self._state, self._since = state, time_s
        patience = {"collapsed": COLLAPSE_S, "suspicious": SUSPICIOUS_S, "recovered": 0.0}[state]
        if state == self._said or time_s - self._since < patience or (state == "recovered" and not self._said):
            return None
        self._said = "" if state == "recovered" else state
        return {
            "event": f"mtp.{state}",
            "accept_length": round(accept_length, 3),
            "floor": self.floor,
            "most": self.most,
        }
