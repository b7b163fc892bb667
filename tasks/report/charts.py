"""The report's pictures: altair charts as inline SVG, coloured by the page's CSS variables so that dark mode works."""

from typing import Any

import altair as alt
import numpy as np
import polars as pl
import vl_convert

INK, FAINT, FIRST, SECOND, BAD, GOOD = "#010203", "#010204", "#010205", "#010206", "#010207", "#010208"
"""Stand-ins that no palette has; the SVG's text is searched for them."""

VARIABLES = {
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    FIRST: "var(--first)",
    SECOND: "var(--second)",
    BAD: "var(--bad)",
    GOOD: "var(--good)",
}
LEVELS = {"ok": GOOD, "warning": SECOND, "critical": BAD, "unknown": INK}
WIDTH, HEIGHT = 560, 190
BINS = 48
FONT_PX = 13
"""A phone shows a picture at about 60 % of its width; 8 px can still be read."""

LANES, LANE_PX = 6, 12
"""Labels of verdicts are written in so many lanes."""

Chart = Any


def svg(chart: Chart, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Inline SVG that scales with the page and follows its colours."""
    if not isinstance(chart, alt.VConcatChart):
        chart = chart.properties(width=width, height=height)
    axis: dict[str, Any] = {
        "labelColor": INK,
        "titleColor": INK,
        "gridColor": FAINT,
        "domainColor": FAINT,
        "tickColor": FAINT,
    }
    axis |= {"labelFontSize": FONT_PX, "titleFontSize": FONT_PX}
    legend: dict[str, Any] = {"labelColor": INK, "titleColor": INK, "orient": "top", "title": None}
    styled = chart.configure(background="transparent", font="system-ui, sans-serif").configure_axis(**axis)
    styled = styled.configure_legend(**legend).configure_view(stroke=None)
    text: str = vl_convert.vegalite_to_svg(styled.to_json())
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, variable)
    start = text.index("<svg")
    head, _, rest = text[start:].partition(">")
    return f'{_scalable(head)} role="img">{rest}'


def _scalable(head: str) -> str:
    """Keep the viewBox, drop the fixed size."""
    words = head.split(" ")
    return " ".join(word for word in words if not word.startswith(("width=", "height=")))


def histogram(values: pl.Series, title: str, color: str = FIRST) -> Chart | None:
    """Counts over logarithmic bins where the values span decades, else even ones; the median is marked."""
    known = values.drop_nulls().to_numpy()
    if not known.size:
        return None
    low, high = max(float(known.min()), 1.0), float(known.max())
    wide = high / low > 50
    edges = (
        np.geomspace(low, high * 1.001, BINS + 1) if wide else np.linspace(float(known.min()), high + 1e-9, BINS + 1)
    )
    counts, edges = np.histogram(np.maximum(known, edges[0]), bins=np.unique(edges) if high > low else 1)
    rows = [
        {"from": float(a), "to": float(b), "n": int(n)} for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    scale = alt.Scale(type="log", nice=False) if wide else alt.Scale(zero=False, nice=False)
    x = alt.X("from:Q", title=title, scale=scale, axis=alt.Axis(tickCount=6, format="~s", labelOverlap=True))
    bars = alt.Chart(alt.InlineData(values=rows)).mark_rect(color=color).encode(
        x=x, x2="to:Q", y=alt.Y("n:Q", title="rows"), y2=alt.datum(0)
    )  # fmt: skip
    median = {"value": float(np.median(known)), "text": f"median {np.median(known):,.0f}"}
    return bars + _mark([median], "value:Q")


def lines(
    frame: pl.DataFrame, column: str, title: str, marks: list[dict[str, Any]] | None = None, color: str = FIRST
) -> Chart | None:
    """One quantity over time, with labelled rules where something was judged."""
    known = frame.drop_nulls(column)
    if known.height < 2:
        return None
    rows = [{"t": t * 1000, "v": v} for t, v in known.select("time_s", column).rows()]
    x = alt.X("t:T", title=None, scale=alt.Scale(type="utc"), axis=alt.Axis(tickCount=6, labelOverlap=True))
    y = alt.Y("v:Q", title=title, axis=alt.Axis(format="~s", tickCount=5))
    line = alt.Chart(alt.InlineData(values=rows)).mark_line(color=color, strokeWidth=1.5).encode(x=x, y=y)
    if not marks:
        return line
    middle_ms = 500 * (float(known["time_s"].min()) + float(known["time_s"].max()))  # type: ignore[arg-type]
    return line + _mark([{**mark, "left": mark["t"] > middle_ms} for mark in marks], "t:T")


def stacked(*charts: Chart | None) -> Chart | None:
    """Charts over the same time, one below the other."""
    shown = [chart.properties(width=WIDTH, height=HEIGHT - 50) for chart in charts if chart is not None]
    return alt.vconcat(*shown).resolve_scale(x="shared") if shown else None


def calibration(windows: list[dict[str, Any]], chosen: list[float]) -> Chart | None:
    """Throughput against requests in flight, one point a window; the choice is marked."""
    if not windows:
        return None
    data = alt.InlineData(values=windows)
    levels = sorted({int(row["concurrency"]) for row in windows if row.get("concurrency") is not None})
    axis = alt.Axis(values=levels, format="d", labelOverlap=True)
    x = alt.X("concurrency:Q", title="requests in flight a server", scale=alt.Scale(zero=False), axis=axis)
    points = (
        alt.Chart(data)
        .mark_point(color=FIRST, filled=True, size=45)
        .encode(x=x, y=alt.Y("tok_s:Q", title="tokens a second"))
    )
    marks = [{"c": float(c), "text": f"chosen {c:g}"} for c in sorted(set(chosen))[:1]]
    return points + _mark(marks, "c:Q") if marks else points


def forecast(rows: list[dict[str, Any]], unit: str = "hours") -> Chart | None:
    """Each forecast's median and 90 % interval of the end, against the end that came; all in `unit`."""
    if not rows:
        return None
    data = alt.InlineData(values=rows)
    x = alt.X("made:Q", title=f"{unit} into the run", axis=alt.Axis(tickCount=6, labelOverlap=True))
    bars = (
        alt.Chart(data)
        .mark_rule(color=FIRST, strokeWidth=3)
        .encode(x=x, y=alt.Y("low:Q", title=f"{unit} in all"), y2="high:Q")
    )
    points = alt.Chart(data).mark_point(color=FIRST, filled=True, size=50).encode(x=x, y="median:Q")
    real = [row for row in rows if row.get("real") is not None][:1]
    if not real:
        return bars + points
    rule = alt.Chart(alt.InlineData(values=real)).mark_rule(color=BAD, strokeDash=[5, 3]).encode(y="real:Q")
    return bars + points + rule


def _mark(rows: list[dict[str, Any]], field: str) -> Chart:
    """Vertical rules with a label; `level` colours them, `left` puts the label left of its rule.

    Neighbours' labels lie in different lanes, one below the other, so that they can be read where rules are close.
    """
    name = field.partition(":")[0]
    shown = [
        {**row, "color": row.get("color", LEVELS.get(str(row.get("level")), INK)), "lane": index % LANES}
        for index, row in enumerate(sorted(rows, key=lambda row: float(row[name])))
    ]
    color = alt.Color("color:N", scale=None)
    chart = alt.Chart(alt.InlineData(values=shown)).mark_rule(strokeDash=[4, 3]).encode(x=field, color=color)
    for lane, left in sorted({(row["lane"], bool(row.get("left"))) for row in shown}):
        mine = [row for row in shown if (row["lane"], bool(row.get("left"))) == (lane, left)]
        place: dict[str, Any] = {"align": "right", "dx": -4} if left else {"align": "left", "dx": 4}
        text = alt.Chart(alt.InlineData(values=mine)).mark_text(y=6 + LANE_PX * lane, fontSize=10, **place)
        chart += text.encode(x=field, text="text:N", color=color)
    return chart
