"""Sliding window over the most recent answers: stops the run while the damage is a few hundred answers. Pure."""

from collections import Counter, deque
from dataclasses import dataclass

from tasks.generation.reasons import Reason, describe
from tasks.generation.settings import BreakerSettings
from tasks.records import Expectation, GateReport, Level

EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Seen:
    """One judged answer or terminal failure; `reason` None is a good one."""

    reason: Reason | None
    prompt_id: str = ""
    server: str = ""
    detail: str = ""


class Breaker:
    """`observe` returns a report the moment the window is over the budget, else None."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._window: deque[Seen] = deque(maxlen=settings.window)
        self._bad = 0
        self.total = 0
        self.reasons: Counter[str] = Counter()

    def observe(self, seen: Seen) -> GateReport | None:
        """Add one; judge the window."""
        if len(self._window) == self._window.maxlen and self._window[0].reason is not None:
            self._bad -= 1
        self._window.append(seen)
        self.total += 1
        if seen.reason is not None:
            self._bad += 1
            self.reasons[seen.reason.value] += 1
        enough = len(self._window) >= min(self._settings.min_answers, self._settings.window)
        return self.report() if enough and self.share > self._settings.max_bad_share else None

    @property
    def share(self) -> float:
        """Bad share of the window, 0..1."""
        return self._bad / len(self._window) if self._window else 0.0

    def reset(self) -> None:
        """Forget the window (a person let the run go on)."""
        self._window.clear()
        self._bad = 0

    def report(self) -> GateReport:
        """The evidence: shares, reasons, servers and examples of the window."""
        bad = [seen for seen in self._window if seen.reason is not None]
        reasons = Counter(str(seen.reason) for seen in bad)
        top = ", ".join(f"{name} {count}" for name, count in reasons.most_common(3))
        text = f"{len(bad)} of the last {len(self._window)} answers were bad ({self.share:.0%}): {top}"
        over = self.share > self._settings.max_bad_share
        checks = [
            Expectation(name, False, f"{count} answers: {describe(name)}", Level.CRITICAL, _examples(bad, name))
            for name, count in reasons.most_common()
        ]
        return GateReport(
            "generation",
            "OVER_BUDGET" if over else "WITHIN_BUDGET",
            Level.CRITICAL if over else Level.OK,
            self._settings.mode,
            text,
            tuple(checks),
            (
                "read the examples: do the servers answer at all, with thinking, and through their reasoning parser?",
                "compare bad answers per server: one bad server is ejected by hand, all of them point to the spec",
                f"the budget is generation.breaker.max_bad_share = {self._settings.max_bad_share:g}",
            ),
            {
                "window": len(self._window),
                "bad": len(bad),
                "share": self.share,
                "reasons": dict(reasons),
                "servers": dict(Counter(seen.server for seen in bad)),
                "answers_so_far": self.total,
            },
        )


def whole_run(done: int, failed: int, settings: BreakerSettings) -> GateReport:
    """The same budget held against all prompts of a run, before it is published.

    The window is empty at every start and judges from `min_answers` on, so a run that was stopped and resumed often
    could end with more failures than it ever saw at once.
    """
    total = done + failed
    over = total >= settings.min_answers and failed > settings.max_bad_share * total
    return GateReport(
        "failures",
        "OVER_BUDGET" if over else "WITHIN_BUDGET",
        Level.CRITICAL if over else Level.OK,
        settings.mode,
        f"{failed:,} of {total:,} prompts have no usable answer ({failed / total if total else 0:.1%})",
        (),
        (
            "read failed.parquet in the run's chunks for the reasons",
            "run again with --retry-failed (generation.retry_failed) once the cause is mended",
            f"or raise generation.breaker.max_bad_share ({settings.max_bad_share:g}) if this many failures are meant",
        )
        if over
        else (),
        {"done": done, "failed": failed},
    )


def _examples(bad: list[Seen], name: str) -> dict[str, object]:
    chosen = [seen for seen in bad if seen.reason == name][-EXAMPLES:]
    return {"examples": [{"prompt_id": s.prompt_id, "server": s.server, "detail": s.detail[:300]} for s in chosen]}
