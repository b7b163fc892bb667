"""Watts over time, with limit lines, the windows that were judged and what was found. PNG or SVG, no browser."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import altair as alt

from tasks.power.readings import UPDATE_PERIOD_S
from tasks.records import GateReport, PowerSample

MOST_POINTS = 1500
"""A GPU's line is thinned to so many bucket means; the picture stays small for a run of days."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at `time_s` (Unix)."""

    time_s: float
    text: str
    level: str = "ok"


def power_chart(
    samples: Sequence[PowerSample],
    *,
    windows: Mapping[str, Sequence[float]] | None = None,
    marks: Sequence[Mark] = (),
    title: str = "GPU power",
) -> Any:
    """Watts of each GPU; enforced (dashed) and default limits as lines; judged windows as bands; marks as labels."""
    lines = (
        alt.Chart(alt.InlineData(values=thinned(samples)))
        .mark_line(strokeWidth=1.2)
        .encode(
            x=alt.X("time:T", title="time (UTC)"),
            y=alt.Y("watts:Q", title="watts"),
            color=alt.Color("gpu:N", title="GPU"),
        )
    )
    layers: list[Any] = [*_bands(windows or {}), lines, *_limits(samples), *_marks(marks, samples)]
    return alt.layer(*layers).properties(title=title, width=860, height=300)


def power_png(samples: Sequence[PowerSample], **options: Any) -> bytes:
    """`power_chart` as PNG bytes; empty when there is no power reading."""
    if not any(_watts(sample) is not None for sample in samples):
        return b""
    import vl_convert

    return bytes(vl_convert.vegalite_to_png(power_chart(samples, **options).to_dict(), scale=1.5))


def power_svg(samples: Sequence[PowerSample], **options: Any) -> str:
    """`power_chart` as SVG text; empty when there is no power reading."""
    if not any(_watts(sample) is not None for sample in samples):
        return ""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(power_chart(samples, **options).to_dict()))


def gate_picture(report: GateReport, samples: Sequence[PowerSample]) -> bytes:
    """The picture of a gate's report: the probe windows and each server's verdict on the watts. PNG, or empty."""
    windows = dict(report.details.get("windows") or {})
    servers = report.details.get("servers") or {}
    marks = [Mark(span[1], f"{name}: {servers.get(name, {}).get('verdict', '')}") for name, span in windows.items()]
    return power_png(samples, windows=windows, marks=marks, title=f"{report.gate}: {report.verdict}")


def thinned(samples: Sequence[PowerSample], most: int = MOST_POINTS) -> list[dict[str, Any]]:
    """Means of equal time buckets for each GPU, at most `most` a GPU."""
    if not samples:
        return []
    times = [sample.time_s for sample in samples]
    start_s, step_s = min(times), max(UPDATE_PERIOD_S, (max(times) - min(times)) / most)
    sums: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        watts = _watts(sample)
        if watts is not None:
            sums.setdefault((sample.gpu_uuid, int((sample.time_s - start_s) / step_s)), []).append(watts)
    return [
        {"gpu": _short(uuid), "time": _clock(start_s + bucket * step_s), "watts": round(sum(values) / len(values), 1)}
        for (uuid, bucket), values in sorted(sums.items())
    ]


def _bands(windows: Mapping[str, Sequence[float]]) -> list[Any]:
    rows = [{"server": name, "from": _clock(span[0]), "to": _clock(span[1])} for name, span in windows.items()]
    if not rows:
        return []
    chart = alt.Chart(alt.InlineData(values=rows)).mark_rect(opacity=0.12, color="#4c78a8")
    return [chart.encode(x="from:T", x2="to:T")]


def _limits(samples: Sequence[PowerSample]) -> list[Any]:
    layers = []
    for name, attribute, dash in (
        ("enforced limit", "enforced_limit_w", [6, 3]),
        ("default limit", "default_limit_w", [2, 2]),
    ):
        values = sorted({round(v) for s in samples if (v := getattr(s, attribute)) is not None})
        if not values:
            continue
        rows = [{"watts": value, "what": f"{name} {value} W"} for value in values]
        base = alt.Chart(alt.InlineData(values=rows))
        layers.append(base.mark_rule(strokeDash=dash, color="#888").encode(y="watts:Q"))
        shift = -5 if name.startswith("enforced") else 9
        layers.append(
            base.mark_text(align="left", dx=4, dy=shift, color="#666").encode(
                y="watts:Q", text="what:N", x=alt.value(0)
            )
        )
    return layers


def _marks(marks: Sequence[Mark], samples: Sequence[PowerSample]) -> list[Any]:
    if not marks:
        return []
    top = max((watts for s in samples if (watts := _watts(s)) is not None), default=0.0)
    rows = [{"time": _clock(m.time_s), "text": m.text, "level": m.level, "y": top * 1.04} for m in marks]
    base = alt.Chart(alt.InlineData(values=rows))
    rule = base.mark_rule(color="#e45756", strokeWidth=1).encode(x="time:T")
    return [rule, base.mark_text(align="right", dx=-4, color="#b22").encode(x="time:T", y="y:Q", text="text:N")]


def _watts(sample: PowerSample) -> float | None:
    return sample.power_average_w if sample.power_average_w is not None else sample.power_instant_w


def _short(uuid: str) -> str:
    return uuid[:12]


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
