"""Where a run stands, from its files alone: no server, no lock, nothing is written."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.report.figures import Figures, duration, figures
from tasks.report.find import worked_on_s
from tasks.report.read import RunData, read_run
from tasks.runs import RunPaths

ALIVE_S = 60.0
"""A run that reports every few seconds and left no trace for this long is not running."""

RECENT_S = 300.0
"""Rates and the remaining time come from the last five minutes."""

INTERRUPTS = ("KeyboardInterrupt", "CancelledError", "SystemExit", "GeneratorExit", "Cancelled")
"""Kinds in record.json's `error` that say a person, or the machine, ended the run."""

NEXT = {
    "interrupted": "run the same command again: it goes on",
    "failed": "mend what the error names, then run the same command again: it goes on",
}


@dataclass(frozen=True, slots=True)
class Status:
    """`state` is running, interrupted, failed, finished or published. ETA in seconds: (median, low, high) or None."""

    state: str
    figures: Figures
    data: RunData
    in_flight: int
    recent_tok_s: float | None
    reject_rate: float | None
    eta_s: tuple[float, float, float] | None
    quiet_s: float

    def as_dict(self) -> dict[str, Any]:
        """The last line of `regen status`."""
        found = self.figures
        return {
            "run_id": found.run_id,
            "run_dir": str(self.data.paths.run_dir),
            "dataset": found.dataset,
            "state": self.state,
            "total": found.total,
            "done": found.done,
            "failed": found.failed,
            "pending": found.pending,
            "in_flight": self.in_flight,
            "output_tokens": found.output_tokens,
            "tok_s": _round(self.recent_tok_s or found.tok_s),
            "reject_rate": self.reject_rate,
            "accept_length": _round(found.accept_length),
            "j_per_token": _round(found.j_per_token),
            "eta_s": self.eta_s,
            "servers": dict(self.data.servers) if self.state == "running" else {},
            **({"error": dict(self.error)} if self.error else {}),
            "chunks": len(self.data.chunks),
            "published_chunks": len(list(self.data.paths.chunks.glob("*/published.json"))),
            "quiet_s": round(self.quiet_s, 1),
        }

    @property
    def error(self) -> Mapping[str, Any]:
        """`kind` and `message` of what ended the run, or nothing; an interrupt is no error."""
        error = self.data.fact("error")
        return error if self.state == "failed" else {}

    def rows(self) -> list[tuple[str, str]]:
        """What a person reads, line by line."""
        found = self.figures
        eta = self.eta_s and f"{duration(self.eta_s[0])} ({duration(self.eta_s[1])} to {duration(self.eta_s[2])})"
        down = [f"{name}: {state}" for name, state in self.data.servers.items() if state != "up"]
        servers = f"{len(self.data.servers) - len(down)} up" + "".join(f", {text}" for text in down)
        gates = [f"{name} {r.get('verdict')}" for name, r in self.data.fact("gates").items()]
        shown: list[tuple[str, Any]] = [
            ("run", f"{found.dataset} / {found.run_id}"),
            ("state", self.state + (f", no trace for {duration(self.quiet_s)}" if self.state == "interrupted" else "")),
            ("error", f"{self.error.get('kind')}: {self.error.get('message')}" if self.error else None),
            ("done", f"{found.done:,}" + (f" of {found.total:,}" if found.total else "")),
            ("failed", f"{found.failed:,} {_reasons(found)}".strip()),
            ("pending", None if found.pending is None else f"{found.pending:,} ({self.in_flight:,} in flight)"),
            ("speed", f"{self.recent_tok_s:,.0f} tok/s lately" if self.recent_tok_s else None),
            ("remaining", eta),
            ("servers", servers if self.data.servers and self.state == "running" else None),
            ("gates", ", ".join(gates) or None),
            ("next", NEXT.get(self.state)),
        ]
        return [(name, str(value)) for name, value in shown if value]


def read_status(paths: RunPaths, now_s: float | None = None) -> Status:
    """Read the run's files. `now_s` is Unix time."""
    data, now = read_run(paths), time.time() if now_s is None else now_s
    found = figures(data)
    last = data.progress.tail(1).to_dicts()[0] if data.progress.height else {}
    quiet = max(0.0, now - worked_on_s(paths.run_dir))
    state = _state(data, quiet)
    recent = data.progress.filter(data.progress["time_s"] >= float(last.get("time_s") or 0) - RECENT_S)
    return Status(
        state,
        found,
        data,
        int(last.get("in_flight") or 0) if state == "running" else 0,
        _slope(recent, "output_tokens"),
        last.get("reject_rate"),
        _eta(data, found, recent) if state == "running" else None,
        quiet,
    )


def _state(data: RunData, quiet_s: float) -> str:
    current = data.paths.dataset_dir / "current"
    mine = current.exists() and current.read_text(encoding="utf-8").strip() == data.paths.run_id
    if data.fact("summary"):
        return "published" if data.fact("summary").get("manifest") else "finished"
    if kind := data.fact("error").get("kind"):
        return "interrupted" if kind in INTERRUPTS else "failed"
    if not mine:
        return "published" if any(data.paths.chunks.glob("*/published.json")) else "finished"
    return "running" if quiet_s < ALIVE_S else "interrupted"


def _eta(data: RunData, found: Figures, recent: Any) -> tuple[float, float, float] | None:
    """The run's own forecast where it writes one, else the pending prompts at the recent rate, a fifth either way."""
    line = data.last_line.get("eta_s")
    if isinstance(line, list) and len(line) == 3:
        return (float(line[0]), float(line[1]), float(line[2]))
    rate = _slope(recent, "done")
    if not rate or found.pending is None:
        return None
    middle = found.pending / rate
    return (middle, 0.8 * middle, 1.2 * middle)


def _slope(frame: Any, name: str) -> float | None:
    known = frame.drop_nulls(name)
    if known.height < 2:
        return None
    seconds = float(known["time_s"][-1] - known["time_s"][0])
    grown = float(known[name][-1] - known[name][0])
    return grown / seconds if seconds > 0 and grown > 0 else None


def _reasons(found: Figures) -> str:
    top = sorted(found.failed_reasons.items(), key=lambda item: -item[1])[:3]
    return f"({', '.join(f'{code} {n:,}' for code, n in top)})" if top else ""


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
