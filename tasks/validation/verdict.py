"""The verdict: may one train on this, or is there enough to regenerate? Pure: sums in, a GateReport out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.records import Expectation, GateReport, Level
from tasks.validation.reasons import RESPONSE_REASONS, Reason
from tasks.validation.settings import SourceSettings

EMPTY = frozenset({Reason.TOO_FEW_SUPERVISED_TOKENS.value, Reason.EMPTY_ASSISTANT.value})
"""Old samples that teach nothing: held against source.max_empty_share where one trains."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Rows by outcome; `tokens` describes masks where rows were tokenized."""

    rows: int
    kept: int
    reasons: Mapping[str, int]
    duplicates: Mapping[str, int]
    regenerate: Mapping[str, int]
    prompts: int = 0
    tokens: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rejected(self) -> int:
        """Rows with a reject reason."""
        return sum(self.reasons.values())

    @property
    def duplicate_rows(self) -> int:
        """Rows that repeat another, or are done already."""
        return sum(self.duplicates.values())


def judge(sums: Sums, settings: SourceSettings, *, for_training: bool) -> GateReport:
    """PASSED, EMPTY_ANSWERS, TOO_MANY_REJECTS or NOTHING_USABLE."""
    checks = [_usable(sums, for_training), *([_empty(sums, settings)] if for_training else [])]
    checks.append(_rejects(sums, settings, for_training))
    failed = [check for check in checks if not check.passed]
    verdict = failed[0].name if failed else "PASSED"
    if failed:
        summary = failed[0].message
    elif for_training:
        summary = f"{sums.kept:,} of {sums.rows:,} rows may be trained on"
    else:
        summary = f"{sums.kept:,} usable prompts in {sums.rows:,} rows{_old(sums)}"
    return GateReport(
        gate="validation",
        verdict=verdict,
        level=Level.CRITICAL if failed else Level.OK,
        mode=settings.gate,
        summary=summary,
        expectations=tuple(checks),
        next_steps=tuple(_next_steps(verdict, sums, for_training)),
        details=_details(sums),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _old(sums: Sums) -> str:
    bad = sum(sums.regenerate.values())
    if not bad:
        return ""
    return f"; {bad:,} of them ({_share(bad, sums.kept):.1%}) have a bad old response{_common_mask(sums)}"


def _common_mask(sums: Sums) -> str:
    common = sums.tokens.get("common_mask")
    if not common:
        return ""
    return (
        f": the most common mask has {common['supervised']} supervised tokens, "
        f"{common['scaffold']} of them template scaffold ({common['rows']:,} samples)"
    )


def _usable(sums: Sums, for_training: bool) -> Expectation:
    what = "row that may be trained on" if for_training else "usable prompt"
    done = sums.duplicates.get(Reason.ALREADY_DONE.value, 0)
    top = ", ".join(f"{code} {n:,}" for code, n in sorted(sums.reasons.items(), key=lambda item: -item[1])[:3])
    message = f"{sums.kept:,} kept" if sums.kept or done else f"not one {what} in {sums.rows:,} rows: {top}"
    return Expectation("NOTHING_USABLE", bool(sums.kept or done), message)


def _empty(sums: Sums, settings: SourceSettings) -> Expectation:
    empty = sum(sums.reasons.get(code, 0) for code in EMPTY)
    share = _share(empty, sums.rows)
    floor = settings.min_content_tokens
    message = f"{share:.1%} of {sums.rows:,} samples supervise fewer than {floor} content tokens"
    common = sums.tokens.get("common_mask")
    if common and common["supervised"] - common["scaffold"] < floor:
        message += f"; {_common_mask(sums).removeprefix(': ')}"
    details = {"empty": empty, "share": share, "allowed": settings.max_empty_share}
    return Expectation(
        "EMPTY_ANSWERS", share <= settings.max_empty_share, f"{message} (allowed {settings.max_empty_share:.0%})",
        details=details,
    )  # fmt: skip


def _rejects(sums: Sums, settings: SourceSettings, for_training: bool) -> Expectation:
    # Where one regenerates, a bad old response is no reject: only unusable prompts are counted here.
    share = _share(sums.rejected, sums.rows)
    what = "rows" if for_training else "prompts"
    allowed = f"allowed {settings.max_reject_share:.0%}"
    message = f"{share:.1%} of {what} rejected ({sums.rejected:,} of {sums.rows:,}; {allowed})"
    passed = share <= settings.max_reject_share
    return Expectation("TOO_MANY_REJECTS", passed, message, details={"share": share})


def _next_steps(verdict: str, sums: Sums, for_training: bool) -> list[str]:
    if verdict == "PASSED":
        return []
    steps = ["Read the examples of each reason; the file of rejected rows names every row."]
    if for_training and any(sums.reasons.get(code.value) for code in RESPONSE_REASONS):
        steps.append("The prompts are not waste: `regen run` regenerates the responses with the target itself.")
    if verdict == "TOO_MANY_REJECTS":
        steps.append("If these rejects are expected, raise source.max_reject_share or set source.gate to monitor.")
    if verdict == "EMPTY_ANSWERS":
        steps.append("If short answers are wanted, lower --min-content-tokens (source.min_content_tokens).")
    return steps


def _details(sums: Sums) -> dict[str, Any]:
    return {
        "rows": sums.rows,
        "kept": sums.kept,
        "rejected": sums.rejected,
        "duplicates": sums.duplicate_rows,
        "prompts": sums.prompts,
        "reasons": dict(sums.reasons),
        "duplicate_reasons": dict(sums.duplicates),
        "regenerate_reasons": dict(sums.regenerate),
        **({"tokens": dict(sums.tokens)} if sums.tokens else {}),
    }
