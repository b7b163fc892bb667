"""How often the output limit cut an answer, read from completions.parquet: for the card, the report and the demo.

`finish_reason` of a turn is what the server said. `cut_reason` of a row says why its conversation ended before its last
turn: nobody answers after half a sentence.
"""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

NAMES = ("conversations", "turns", "cut_conversations", "cut_turns", "ended_by_cut")


def count_cuts(completions: Path) -> dict[str, int]:
    """Conversations, turns, those of them cut at the limit, and conversations that a cut ended early.

    Reads the two columns that tell, never the token ids. {} where the file does not say how turns finished.
    """
    with pq.ParquetFile(completions) as file:
        paths = [file.schema.column(index).path for index in range(len(file.schema))]
        finish = [path for path in paths if path.startswith("turns.") and path.endswith(".finish_reason")]
        if not finish:
            return {}
        frame = pl.from_arrow(file.read(columns=[*finish, *(path for path in paths if path == "cut_reason")]))
    assert isinstance(frame, pl.DataFrame)
    cut = pl.col("turns").list.eval(pl.element().struct.field("finish_reason") == "length").list.sum().fill_null(0)
    turns = pl.col("turns").list.len().fill_null(0)
    ended = (
        pl.col("cut_reason").cast(pl.String).str.starts_with("TRUNCATED")
        if "cut_reason" in frame.columns
        else pl.lit(False)
    )
    sums = frame.select(
        pl.len().alias("n"),
        turns=turns.sum(),
        cut_conversations=(cut > 0).sum(),
        cut_turns=cut.sum(),
        ended=(ended & (turns > 0)).sum(),
    )
    return {name: int(value or 0) for name, value in zip(NAMES, sums.row(0), strict=True)}


def cut_text(counts: Mapping[str, int]) -> str:
    """`3 conversations, 4 of 26 turns; 1 ended there, before its last turn`; empty where nothing is known."""
    if not counts.get("turns"):
        return ""
    cut, ended = counts.get("cut_turns", 0), counts.get("ended_by_cut", 0)
    if not cut:
        return f"none of {counts['turns']:,} turns"
    text = f"{plural(counts.get('cut_conversations', 0), 'conversation')}, {cut:,} of {plural(counts['turns'], 'turn')}"
    return f"{text}; {ended:,} ended there, before the last turn" if ended else text


def plural(count: int, name: str) -> str:
    """`1 turn`, `2 turns`."""
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"
