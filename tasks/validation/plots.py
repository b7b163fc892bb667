"""The histogram of supervised tokens, as a PNG that needs no browser (altair and vl-convert)."""

from collections.abc import Sequence
from itertools import pairwise
from textwrap import wrap

import altair as alt
import polars as pl
import vl_convert


def bin_names(edges: Sequence[int]) -> list[str]:
    """Readable names of bins given by their left edges; the last is open."""
    names = [str(left) if right - left == 1 else f"{left:,}–{right - 1:,}" for left, right in pairwise(edges)]
    return [*names, f"≥ {edges[-1]:,}"]


def histogram_png(histogram: Sequence[Sequence[int]], floor: int, summary: str) -> bytes:
    """A bar a bin of supervised tokens a sample; samples below the floor of content tokens stand out in red.

    `histogram` is that of `tally.describe`: [left edge, samples, samples below the floor].
    """
    names = bin_names([edge for edge, _, _ in histogram])
    total = max(sum(count for _, count, _ in histogram), 1)
    kinds = ("below the floor", "may teach")
    frame = pl.DataFrame(
        {
            "bin": [name for name in names for _ in kinds],
            "samples": [n for _, count, below in histogram for n in (below, count - below)],
            "kind": list(kinds) * len(names),
        }
    )
    shares = [f"{count / total:.0%}" if count / total >= 0.005 else "" for _, count, _ in histogram]
    tops = pl.DataFrame({"bin": names, "samples": [count for _, count, _ in histogram], "share": shares})
    x = alt.X("bin:N", sort=names, title="supervised tokens a sample (template scaffold included)")
    y = alt.Y("samples:Q", title="samples")
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=list(kinds), range=["#c0392b", "#2e7d5b"]),
        title=f"floor: {floor} content tokens",
    )
    bars = alt.Chart(frame).mark_bar().encode(x=x, y=y, color=colour)
    labels = alt.Chart(tops).mark_text(dy=-6, fontSize=11).encode(x=x, y=y, text="share:N")
    chart = (bars + labels).properties(width=720, height=300, title=wrap(summary, 95))
    return bytes(vl_convert.vegalite_to_png(chart.to_json(), scale=1.5))
