"""report.html: one self-contained file, light and dark, readable on a phone. See `read` for what it is made from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import polars as pl
from markupsafe import Markup

from tasks.cuts import cut_text
from tasks.report import charts
from tasks.report.figures import Figures, figures, tiles
from tasks.report.read import (
    RunData,
    column,
    cut_answers,
    read_run,
    rejected_reasons,
    sample_answers,
    thinned,
)
from tasks.runs import RunPaths, write_atomic

Table = list[dict[str, Any]]

ALARMS = ("critical", "warning")
"""Levels that a person should look at, worst first."""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page: words, pictures, tables; left out when all are empty."""

    title: str
    text: str = ""
    pictures: tuple[tuple[str, str], ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()
    answers: tuple[Mapping[str, Any], ...] = ()
    broken: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.broken or self.pictures or any(rows for _, rows in self.tables) or self.answers)


def write_report(paths: RunPaths) -> Path:
    """Read the run's files and write report.html atomically; returns its path."""
    write_atomic(paths.report, render(read_run(paths)).encode())
    return paths.report


def render(data: RunData) -> str:
    """The page as text."""
    found = figures(data)
    sections = [section for build in SECTIONS if not (section := _built(build, data, found)).empty]
    source = files("tasks.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(
        found=found, tiles=tiles(found), sections=sections, verdict=_verdict(data), svg=Markup
    )


def came_in(data: RunData, found: Figures) -> Section:
    """What was read, and why rows were rejected."""
    validation = data.fact("validation")
    rows = [{"outcome": name, "rows": validation.get(name)} for name in ("rows", "kept", "rejected", "duplicates")]
    new = data.fact("subtraction") or data.fact("prompts")
    rows += [
        {"outcome": f"prompts {name}", "rows": n}
        for name, n in new.items()
        if name in ("new", "already", "forced", "vanished")
    ]
    return Section(
        "What came in",
        "Every row ends as kept, rejected with a reason, or duplicate of another.",
        tables=(
            ("Sums", [row for row in rows if row["rows"] is not None]),
            ("Rejected because of", _counts(validation.get("reasons"))),
            ("Kept, because the old response was bad", _counts(validation.get("regenerate_reasons"))),
        ),
    )


def lengths(data: RunData, found: Figures) -> Section:
    """Histograms of output and supervised tokens."""
    output = column(data.paths, "completions.parquet", "output_tokens")
    supervised = column(data.paths, "tokens.parquet", "n_supervised")
    pictures = _pictures(
        ("Output tokens of an answer", charts.histogram(output, "tokens")),
        ("Supervised tokens of a training row", charts.histogram(supervised, "tokens", charts.SECOND)),
    )
    cut = cut_text(cut_answers(data.paths))
    return Section("Lengths", f"Cut at the output limit: {cut}." if cut else "", pictures)


def over_time(data: RunData, found: Figures) -> Section:
    """Throughput, watts and acceptance length, with the verdicts marked."""
    marks = verdict_marks(data)
    progress = thinned(data.progress, ["tok_s", "power_w", "accept_length", "reject_rate"])
    watts = data.power.drop_nulls("watts")
    total = watts.group_by((watts["time_s"].floor()).alias("time_s")).agg(watts=watts_sum()).sort("time_s")
    power = thinned(total, ["watts"]) if total.height > 1 else progress.rename({"power_w": "watts"})
    chart = charts.stacked(
        charts.lines(progress, "tok_s", "tokens a second", marks),
        charts.lines(power, "watts", "watts", marks, charts.SECOND),
        charts.lines(progress, "accept_length", "acceptance length"),
    )
    caption = "Over time (UTC); warnings, critical verdicts and changes of the power verdict are marked"
    return Section("Throughput and watts", pictures=_pictures((caption, chart)))


def verdict_marks(data: RunData) -> list[dict[str, Any]]:
    """Labelled times of what a person should look at: gates that warned or worse, and changes during generation."""
    found = [(name, r) for name, r in _gates(data) if r.get("level") in ALARMS]
    found += [("power", change) for change in _items(data.record.get("power_verdicts"))]
    return [
        {"t": r["time_s"] * 1000, "text": f"{name} {r.get('verdict')}", "level": r.get("level")}
        for name, r in found
        if isinstance(r.get("time_s"), (int, float))
    ]


def watts_sum() -> Any:
    """Watts of all GPUs in one second: the mean of each GPU's readings, added."""
    return pl.col("watts").mean() * pl.col("gpu_uuid").n_unique()


def gates(data: RunData, found: Figures) -> Section:
    """Every gate's verdict."""
    rows = [
        {
            "gate": name,
            "verdict": r.get("verdict"),
            "level": r.get("level"),
            "mode": r.get("mode"),
            "found": r.get("summary"),
        }
        for name, r in _gates(data)
    ]
    return Section("Verdicts", tables=(("", rows),))


def calibrated(data: RunData, found: Figures) -> Section:
    """Windows of the calibration and its choice."""
    windows = [
        {
            "server": w.get("server"),
            "concurrency": w.get("concurrency"),
            "tok_s": w.get("tok_s") or (w.get("output_tokens") or 0) / (w.get("duration_s") or 1),
            "power_w": w.get("power_w"),
            "accept_length": w.get("accept_length"),
        }
        for w in _items(data.calibration.get("windows"))
    ]
    limits = data.calibration.get("limits")
    chosen = [float(c) for c in limits.values() if isinstance(c, (int, float))] if isinstance(limits, Mapping) else []
    picture = _pictures(("Throughput by requests in flight", charts.calibration(windows, chosen)))
    return Section("Calibration", str(data.calibration.get("stopped_because") or ""), picture, (("Windows", windows),))


def forecasts(data: RunData, found: Figures) -> Section:
    """Forecast against reality."""
    start = _first_time(data)
    real = found.seconds if data.record.get("finished") or data.fact("summary") or not found.pending else None
    rows = []
    for item in data.forecasts:
        made = item.get("made_s")
        into = max(0.0, made - start) if isinstance(made, (int, float)) and start else 0.0
        whole = item.get("total_s") or [into + float(v) for v in item["time_s"]]
        median, low, high = (float(v) for v in whole)
        rows.append({"made": into, "median": median, "low": low, "high": high, "real": real})
    unit, seconds = _unit(max((float(v) for row in rows for v in row.values() if v is not None), default=0.0))
    scaled = [{name: None if v is None else float(v) / seconds for name, v in row.items()} for row in rows]
    remaining = [item.get("remaining_prompts") for item in data.forecasts]
    table = [
        {**{f"{name}, {unit}": _round(v) for name, v in row.items()}, "remaining prompts": left}
        for row, left in zip(scaled, remaining, strict=True)
    ]
    return Section(
        "Forecast against reality",
        f"{unit.capitalize()} in all: median and 90 % interval of each forecast; the dashed line is what it took.",
        _pictures(("", charts.forecast(scaled, unit))),
        (("", table),),
    )


def failures(data: RunData, found: Figures) -> Section:
    """Failed prompts, refused rows, retries and restarts."""
    attempts = [a for key in ("server_starts", "server_events", "fleet") for a in _items(data.record.get(key))]
    names = ("time_s", "server", "name", "event", "outcome", "reason", "attempt", "seconds")
    rows = [{n: a[n] for n in names if a.get(n) is not None} for a in attempts]
    retries = data.fact("generation").get("retries")
    text = f"{retries:,} requests were sent again." if isinstance(retries, int) else ""
    return Section(
        "Failures, retries and restarts",
        text,
        tables=(
            ("Not answered because of", _counts(found.failed_reasons)),
            ("Training rows refused because of", _counts(rejected_reasons(data.paths))),
            ("Server starts and restarts", _same_columns(rows)),
        ),
    )


def answers(data: RunData, found: Figures) -> Section:
    """Samples of what the target said."""
    return Section("Samples of answers", answers=tuple(sample_answers(data.paths)))


def made_with(data: RunData, found: Figures) -> Section:
    """Identity, servers, hardware, versions."""
    identity = data.spec.get("identity") or {}
    rows: Table = [
        {"what": "identity", "value": data.spec.get("identity_digest")},
        {"what": "chat template sha256", "value": identity.get("template_sha256")},
        {"what": "revision", "value": data.group("target").get("revision")},
        {
            "what": "sampling",
            "value": ", ".join(f"{n} {v}" for n, v in data.group("sampling").items() if v not in (None, [], ())),
        },
        {"what": "host", "value": data.spec.get("host")},
        {"what": "versions", "value": ", ".join(f"{n} {v}" for n, v in (data.spec.get("versions") or {}).items())},
    ]
    servers = [
        {"server": s.get("name"), "engine": f"{s.get('engine')} {s.get('version') or ''}", "model": s.get("model")}
        for s in _items(data.record.get("servers"))
    ]
    gpus = [dict(g) for g in _items(data.record.get("gpus"))]
    tables = (("", [r for r in rows if r["value"]]), ("Servers", servers), ("GPUs", _same_columns(gpus)))
    return Section("Made with", tables=tables)


SECTIONS: tuple[Callable[[RunData, Figures], Section], ...] = (
    came_in,
    over_time,
    gates,
    lengths,
    calibrated,
    forecasts,
    failures,
    answers,
    made_with,
)


def _built(build: Callable[[RunData, Figures], Section], data: RunData, found: Figures) -> Section:
    """One section; what its files say may be nonsense, which the page says instead of failing as a whole."""
    try:
        return build(data, found)
    except (KeyError, TypeError, ValueError, AttributeError, pl.exceptions.PolarsError) as error:
        title = build.__name__.replace("_", " ").capitalize()
        return Section(title, f"This part could not be drawn from the run's files: {error!r}", broken=True)


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _pictures(*pairs: tuple[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((caption, charts.svg(chart)) for caption, chart in pairs if chart is not None)


def _counts(reasons: Any) -> Table:
    items = reasons.items() if isinstance(reasons, Mapping) else []
    return [{"reason": code, "rows": n} for code, n in sorted(items, key=lambda item: -int(item[1]))]


def _same_columns(rows: Table) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name, "") for name in names} for row in rows]


def _gates(data: RunData) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, report) for name, report in data.fact("gates").items() if isinstance(report, Mapping)]


def _verdict(data: RunData) -> tuple[str, str]:
    """(worst level, badge text); the badge names the gates that warned or worse."""
    levels = {str(report.get("level")) for _, report in _gates(data)}
    worst = next((level for level in (*ALARMS, "unknown", "ok") if level in levels), "unknown")
    names = [name for name, report in _gates(data) if report.get("level") == worst]
    return worst, f"{worst}: {', '.join(names)}" if worst in ALARMS else worst


def _unit(longest_s: float) -> tuple[str, float]:
    """(name, seconds) of the unit in which a time up to `longest_s` reads well."""
    if longest_s < 120:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest_s < 3600 else ("hours", 3600.0)


def _first_time(data: RunData) -> float | None:
    if data.progress.height:
        return float(data.progress["time_s"][0])
    started = data.record.get("started")
    return float(started) if isinstance(started, (int, float)) else None


def _round(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value
