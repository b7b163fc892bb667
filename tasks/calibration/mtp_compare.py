"""Which number of draft steps? A pure choice over calibrations of the same job with different MTP settings.

With MTP a GPU reaches its power limit at lower concurrency, and beyond it more draft steps stop paying: the best
number depends on concurrency and acceptance, so it is measured. Most tokens/s wins; within the noise, fewest joules a
token; then fewest steps (least memory for drafts).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.calibration.levels import LevelStats, summarize
from tasks.records import LoadWindow

SAME = 0.02
"""Settings within this share of the best throughput are equally fast; calibration's own tolerance."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One MTP setting at its own best concurrency. `steps` 0 is MTP off."""

    steps: int
    concurrency: int
    tok_s: float
    j_per_token: float | None
    accept_length: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All candidates in order of steps, the winner, and why it won."""

    candidates: tuple[Candidate, ...]
    best: Candidate
    reason: str


def compare(windows: Mapping[int, Sequence[LoadWindow]], limits: Mapping[int, int]) -> Comparison:
    """Choose among settings; `windows` and chosen `limits` of one server by draft steps (0: off).

    Raises ValueError when nothing was measured.
    """
    candidates = []
    for steps in sorted(windows):
        stats = summarize(windows[steps]).get(limits.get(steps, 0))
        if stats is not None:
            candidates.append(_candidate(steps, stats))
    if not candidates:
        raise ValueError("no MTP setting has a usable window at its chosen concurrency")
    fastest = max(candidates, key=lambda c: c.tok_s)
    equal = [c for c in candidates if c.tok_s >= (1 - SAME) * fastest.tok_s]
    best = min(equal, key=lambda c: (c.j_per_token if c.j_per_token is not None else float("inf"), c.steps))
    return Comparison(tuple(candidates), best, _reason(best, fastest, equal))


def rows_of(result: Comparison, failures: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
    """The comparison as a table; settings that could not be measured say why."""
    rows: list[dict[str, Any]] = [
        {
            "draft steps": candidate.steps or "off",
            "best": "✓" if candidate == result.best else "",
            "in flight": candidate.concurrency,
            "output tok/s": round(candidate.tok_s, 1),
            "J/token": None if candidate.j_per_token is None else round(candidate.j_per_token, 3),
            "acceptance length": candidate.accept_length,
            "note": "",
        }
        for candidate in result.candidates
    ]
    return rows + [{"draft steps": steps or "off", "note": reason} for steps, reason in (failures or {}).items()]


def _candidate(steps: int, stats: LevelStats) -> Candidate:
    return Candidate(steps, stats.concurrency, stats.tok_s, stats.j_per_token, stats.accept_length)


def _reason(best: Candidate, fastest: Candidate, equal: list[Candidate]) -> str:
    name = f"{best.steps} draft steps" if best.steps else "MTP off"
    if len(equal) == 1:
        return f"{name}: most tokens/s, {best.tok_s:,.0f} at {best.concurrency} in flight"
    cheaper = "fewest joules a token" if best.j_per_token is not None else "fewest steps"
    return f"{name}: {cheaper} among {len(equal)} settings within {SAME:.0%} of {fastest.tok_s:,.0f} tok/s"
