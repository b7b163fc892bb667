"""Plots as PNG bytes, rendered without a browser: throughput over concurrency, forecast against reality."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import vl_convert

from tasks.calibration.levels import summarize
from tasks.calibration.run import by_server
from tasks.records import CalibrationResult

WIDTH, HEIGHT = 620, 200
PANELS = (
    ("tok_s", "output tok/s"),
    ("power_w", "watts"),
    ("j_per_token", "J/token"),
    ("accept_length", "acceptance length"),
)


def throughput_png(result: CalibrationResult) -> bytes:
    """Throughput, watts, J/token and acceptance against requests in flight; the choice is ringed. Empty: no windows."""
    rows = points(result)
    if not rows:
        return b""
    panels = [_panel(rows, name, title) for name, title in PANELS if any(row[name] is not None for row in rows)]
    return png(alt.vconcat(*panels).properties(title="Throughput over requests in flight"))


def points(result: CalibrationResult) -> list[dict[str, Any]]:
    """One point a server and level, with the panels' values and whether it was chosen."""
    rows = []
    for name, windows in by_server(result).items():
        for level, stats in summarize(windows).items():
            values: dict[str, Any] = {field: getattr(stats, field) for field, _ in PANELS}
            rows.append({"server": name, "in_flight": level, "chosen": result.limits.get(name) == level, **values})
    return rows


def _panel(rows: Sequence[Mapping[str, Any]], field: str, title: str) -> Any:
    shown = [dict(row) for row in rows if row[field] is not None]
    base = alt.Chart(alt.InlineData(values=shown)).encode(
        x=alt.X("in_flight:Q", title="requests in flight a server", scale=alt.Scale(type="log", base=2)),
        y=alt.Y(f"{field}:Q", title=title, scale=alt.Scale(zero=field == "tok_s")),
        color=alt.Color("server:N", title="server"),
    )
    ring = base.transform_filter("datum.chosen").mark_point(size=220, strokeWidth=2.5)
    return (base.mark_line(point=True) + ring).properties(width=WIDTH, height=HEIGHT)


def forecast_png(history: Sequence[Mapping[str, Any]], actual_s: float | None = None) -> bytes:
    """Forecast total hours with their 90 % intervals over the run, and the truth when it is known. Empty: none made.

    `history`: entries of forecast.json (outlook.made).
    """
    rows = [
        {
            "elapsed": entry["elapsed_s"] / 3600,
            **{name: value / 3600 for name, value in zip(("median", "low", "high"), entry["total_s"], strict=True)},
        }
        for entry in history
    ]
    if not rows:
        return b""
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=alt.X("elapsed:Q", title="hours gone"))
    band = base.mark_area(opacity=0.25).encode(y=alt.Y("low:Q", title="forecast of the whole run, hours"), y2="high:Q")
    layers: list[Any] = [band, base.mark_line(point=True).encode(y="median:Q")]
    if actual_s is not None:
        truth = alt.Chart(alt.InlineData(values=[{"hours": actual_s / 3600}]))
        layers.append(truth.mark_rule(strokeDash=[6, 4], strokeWidth=2).encode(y="hours:Q"))
    return png(alt.layer(*layers).properties(width=WIDTH, height=260, title="Forecast against reality"))


def png(chart: Any) -> bytes:
    """Render a chart."""
    return bytes(vl_convert.vegalite_to_png(chart.to_dict(), scale=1.5))
