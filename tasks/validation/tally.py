"""Tokenized rows summed up: exact duplicates over all files, counts, and the tables of kept and rejected rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from tasks.validation.merge import Writer
from tasks.validation.reasons import DUPLICATE_REASONS, Reason
from tasks.validation.schema import KEPT_TOKENS, REJECTED
from tasks.validation.tokenized import CODE, CODES, TokenPart

HISTOGRAM_EDGES = (0, 1, 2, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Left edges of the histogram's bins, in supervised tokens; the last bin is open."""


@dataclass(frozen=True, slots=True)
class TokenSums:
    """What tokenized rows add up to. `common` is the most common (n_supervised, n_scaffold) and its rows."""

    rows: int = 0
    kept: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    details: dict[str, Any] = field(default_factory=dict)


def summarise(
    parts: Sequence[TokenPart], floor: int, kept: Writer, rejected: Writer, decode: Callable[[list[int]], str] | None
) -> TokenSums:
    """Mark duplicates, write both tables, and count. `decode` makes the example readable."""
    if not parts:
        return TokenSums()
    twins = mark_duplicates(parts)
    reasons: Counter[str] = Counter()
    for part, twin in zip(parts, twins, strict=True):
        codes = np.bincount(part.codes, minlength=len(CODES))
        reasons.update({reason.value: int(codes[i]) for i, reason in enumerate(CODES) if reason and codes[i]})
        kept.write(_kept_table(part))
        rejected.write(_rejected_table(part, twin, floor))
    rows = sum(len(part.rows) for part in parts)
    duplicates = {reason.value for reason in DUPLICATE_REASONS}
    lost = Counter({code: n for code, n in reasons.items() if code in duplicates})
    rejects = Counter({code: n for code, n in reasons.items() if code not in duplicates})
    return TokenSums(rows, rows - reasons.total(), rejects, lost, observe(parts, floor, decode))


def observe(parts: Sequence[TokenPart], floor: int, decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    """`describe`, with one example of a row below the floor."""
    details = describe(parts, floor) if parts else {}
    if shown := _example(parts, details, decode):
        details["example"] = shown
    return details


def _example(
    parts: Sequence[TokenPart], details: dict[str, Any], decode: Callable[[list[int]], str] | None
) -> dict[str, Any] | None:
    """One row below the floor, if possible one with the most common mask."""
    shown: list[tuple[bool, dict[str, Any]]] = []
    for part in parts:
        if part.example is None:
            continue
        at, ids = part.example
        common = details.get("common_mask", {}).get("supervised") == int(part.n_supervised[at])
        found: dict[str, Any] = {"source": part.source, "row": int(part.rows[at]), "supervised_ids": ids}
        shown.append((common, found))
        if common:
            break
    if not shown:
        return None
    best = shown[-1][1] if shown[-1][0] else shown[0][1]
    return {**best, "text": decode(best["supervised_ids"])} if decode else best


def mark_duplicates(parts: Sequence[TokenPart]) -> list[dict[int, str]]:
    """Set the code of later rows with the same ids; returns {index in part: 'source:row' of the first} for each part.

    Same means: equal 64-bit hash of the ids, equal length and equal supervised count (n² / 2^65 chance of an error for
    the hash alone: 2·10⁻⁸ for a million rows).
    """
    codes = np.concatenate([part.codes for part in parts])
    fine = np.flatnonzero(codes == 0)
    frame = pl.DataFrame(
        {
            "hash": np.concatenate([part.hashes for part in parts])[fine],
            "tokens": np.concatenate([part.n_tokens for part in parts])[fine],
            "supervised": np.concatenate([part.n_supervised for part in parts])[fine],
            "at": fine,
        }
    )
    first = frame.select(pl.col("at"), pl.col("at").min().over("hash", "tokens", "supervised").alias("first"))
    again = first.filter(pl.col("at") != pl.col("first"))
    starts = np.concatenate(([0], np.cumsum([len(part.rows) for part in parts])))
    twins: list[dict[int, str]] = [{} for _ in parts]
    # Only duplicates are looped over, to name the row that each repeats.
    for at, origin in again.iter_rows():
        here, there = (int(np.searchsorted(starts, i, side="right")) - 1 for i in (at, origin))
        parts[here].codes[at - starts[here]] = CODE[Reason.DUPLICATE]
        twins[here][at - int(starts[here])] = f"{parts[there].source}:{parts[there].rows[origin - starts[there]]}"
    return twins


def _kept_table(part: TokenPart) -> pa.Table:
    fine = part.codes == 0
    source = pa.array([part.source], pa.string()).take(pa.array(np.zeros(int(fine.sum()), np.int32)))
    counts = (part.n_tokens, part.n_supervised, part.n_scaffold, part.n_content)
    return pa.Table.from_arrays([source, *(pa.array(c[fine]) for c in (part.rows, *counts))], schema=KEPT_TOKENS)


def _rejected_table(part: TokenPart, twins: dict[int, str], floor: int) -> pa.Table:
    at = np.flatnonzero(part.codes)
    names = pl.Series("reason", [reason.value if reason else "" for reason in CODES])
    frame = pl.DataFrame(
        {
            "row": part.rows[at],
            "reason": names.gather(part.codes[at]),
            "content": part.n_content[at],
            "supervised": part.n_supervised[at],
            "scaffold": part.n_scaffold[at],
        }
    )
    few = pl.format(
        "{} content tokens ({} supervised, {} of them scaffold), the floor is {}",
        "content",
        "supervised",
        "scaffold",
        pl.lit(floor),
    )
    is_few = pl.col("reason") == Reason.TOO_FEW_SUPERVISED_TOKENS.value
    frame = frame.select("row", "reason", detail=pl.when(is_few).then(few))
    twin = [twins.get(int(i)) for i in at] if twins else [None] * len(at)
    n = len(at)
    ids = part.ids.take(pa.array(at)) if part.ids is not None else pa.nulls(n, pa.string())
    columns = [
        pa.array([part.source], pa.string()).take(pa.array(np.zeros(n, np.int32))),
        frame["row"].to_arrow(),
        ids,
        frame["reason"].to_arrow().cast(pa.string()),
        frame["detail"].to_arrow().cast(pa.string()),
        pa.array(twin, pa.string()),
        pa.nulls(n, pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=REJECTED)


def describe(parts: Sequence[TokenPart], floor: int) -> dict[str, Any]:
    """Sums, the median, the most common mask and the histogram, over rows whose arrays could be judged.

    `histogram` holds [left edge in supervised tokens, rows, rows of them below the floor of content tokens].
    """

    def column(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    structural = np.isin(column("codes"), [CODE[r] for r in (Reason.NULL_ROW, Reason.LENGTH_MISMATCH, Reason.BAD_IDS)])
    supervised, scaffold = column("n_supervised")[~structural], column("n_scaffold")[~structural]
    if not len(supervised):
        return {}
    pairs, counts = np.unique(supervised.astype(np.int64) << 32 | scaffold, return_counts=True)
    common = pairs[int(counts.argmax())]
    bins = np.searchsorted(HISTOGRAM_EDGES, supervised, side="right") - 1
    histogram = np.bincount(bins, minlength=len(HISTOGRAM_EDGES))
    empty = np.bincount(bins[supervised - scaffold < floor], minlength=len(HISTOGRAM_EDGES))
    return {
        "tokens": int(column("n_tokens").sum(dtype=np.int64)),
        "supervised_tokens": int(supervised.sum(dtype=np.int64)),
        "scaffold_tokens": int(scaffold.sum(dtype=np.int64)),
        "content_tokens": int((supervised - scaffold).sum(dtype=np.int64)),
        "median_supervised": float(np.median(supervised)),
        "below_floor": int(((supervised - scaffold) < floor).sum()),
        "common_mask": {
            "supervised": int(common >> 32),
            "scaffold": int(common & 0xFFFFFFFF),
            "rows": int(counts.max()),
        },
        "histogram": [
            [edge, int(n), int(below)] for edge, n, below in zip(HISTOGRAM_EDGES, histogram, empty, strict=True)
        ],
    }
