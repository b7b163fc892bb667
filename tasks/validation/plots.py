"""The histogram of supervised tokens, as a PNG that needs no browser (altair and vl-convert)."""

from collections.abc import Sequence
from itertools import pairwise

import altair as alt
import polars as pl
import vl_convert


def bin_names(edges: Sequence[int]) -> list[str]:
    """Readable names of bins given by their left edges; the last is open."""
    names = [str(left) if right - left == 1 else f"{left:,}–{right - 1:,}" for left, right in pairwise(edges)]
    return [*names, f"≥ {edges[-1]:,}"]


def histogram_png(histogram: Sequence[Sequence[int]], floor: int, summary: str) -> bytes:
    """A bar a bin of supervised tokens a sample; bins that lie wholly below the floor stand out in red."""
    edges = [int(edge) for edge, _ in histogram]
    total = max(sum(count for _, count in histogram), 1)
    rights = [*edges[1:], 1 << 62]
    frame = pl.DataFrame(
        {
            "bin": bin_names(edges),
            "samples": [int(count) for _, count in histogram],
            "share": [f"{count / total:.0%}" if count / total >= 0.005 else "" for _, count in histogram],
            "kind": ["below the floor" if right - 1 < floor else "may teach" for right in rights],
        }
    )
    x = alt.X("bin:N", sort=bin_names(edges), title="supervised tokens a sample (template scaffold included)")
    scale = alt.Scale(domain=["below the floor", "may teach"], range=["#c0392b", "#2e7d5b"])
    base = alt.Chart(frame).encode(x=x, y=alt.Y("samples:Q", title="samples"))
    bars = base.mark_bar().encode(color=alt.Color("kind:N", scale=scale, title=f"floor {floor} content tokens"))
    labels = base.mark_text(dy=-6, fontSize=11).encode(text="share:N")
    chart = (bars + labels).properties(width=720, height=300, title=summary)
    return bytes(vl_convert.vegalite_to_png(chart.to_json(), scale=1.5))
