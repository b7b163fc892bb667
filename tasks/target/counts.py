"""How many supervised tokens carry content: supervised − think markers − separators − end-of-turn tokens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.target.family import Family

CONTENT, MARKER, SPACE = 0, 1, 2
_WHITE = "ĠĊĉč▁ \n\r\t"
"""White space as byte-level (Ġ Ċ ĉ č) and SentencePiece (▁) vocabularies spell it."""

Counts = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class SupervisedCounts:
    """Tokens of one row: supervised = scaffold + content."""

    n_supervised: int
    n_scaffold: int
    n_content: int


@dataclass(frozen=True, slots=True)
class CountTables:
    """`kinds[id]` is CONTENT, MARKER or SPACE; `sequences` are scaffold texts of several tokens."""

    kinds: NDArray[np.uint8]
    sequences: tuple[tuple[int, ...], ...]


def build_tables(
    family: Family, vocab: dict[str, int], size: int, encode: Callable[[str], list[int]], stops: Iterable[int]
) -> CountTables:
    """Tables for one target. A marker of several tokens is looked for with the separators that may merge into it."""
    kinds = np.zeros(size, dtype=np.uint8)
    spaces = [index for token, index in vocab.items() if not token.strip(_WHITE)]
    spaces += [vocab[name] for name in ("<0x0A>", "<0x0D>", "<0x09>", "<0x20>") if name in vocab]
    kinds[spaces] = SPACE
    sequences: set[tuple[int, ...]] = set()
    for text in (family.think_open, family.think_close, *family.end_of_turn, *family.implicit_stops, *family.scaffold):
        ids = encode(text) if text else []
        if len(ids) == 1:
            kinds[ids[0]] = MARKER
        elif ids:
            forms = (text, f"{text}\n", f"{text}\n\n", f"\n{text}", f"\n{text}\n\n")
            sequences |= {tuple(encode(form)) for form in forms}
    kinds[[index for index in stops if 0 <= index < size]] = MARKER
    return CountTables(kinds, tuple(sorted(sequences, key=len, reverse=True)))


def count_many(tables: CountTables, values: NDArray[Any], offsets: NDArray[Any], mask: NDArray[Any]) -> Counts:
    """(n_supervised, n_scaffold, n_content) of every row, int64 each, without a loop over rows.

    Row r is `values[offsets[r]:offsets[r+1]]`; `mask` is aligned with `values` (0 is not supervised). A separator is a
    white-space token next to a marker, or next to such a separator, inside the same row. Work and memory grow with the
    number of supervised tokens, not of all tokens: call it a row group at a time.
    """
    supervised = np.flatnonzero(mask if mask.dtype == np.bool_ else mask != 0)
    bounds = np.searchsorted(supervised, offsets)
    n_supervised = np.diff(bounds)
    if not len(supervised):
        return n_supervised, np.zeros_like(n_supervised), np.zeros_like(n_supervised)
    kinds = np.take(tables.kinds, values[supervised], mode="clip")
    scaffold = kinds == MARKER
    sequence_flat = _sequences(tables, values, offsets, supervised, scaffold)
    _separators(tables, values, offsets, supervised, kinds, scaffold, sequence_flat)
    before = np.concatenate(([0], np.cumsum(scaffold, dtype=np.int64)))
    n_scaffold = before[bounds[1:]] - before[bounds[:-1]]
    return n_supervised, n_scaffold, n_supervised - n_scaffold


def _sequences(
    tables: CountTables,
    values: NDArray[Any],
    offsets: NDArray[Any],
    supervised: NDArray[np.int64],
    scaffold: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Mark supervised tokens inside a scaffold text of several tokens; returns their flat positions, sorted."""
    found: list[NDArray[np.int64]] = []
    for sequence in tables.sequences:
        starts = supervised[values[supervised] == sequence[0]]
        starts = starts[starts + len(sequence) <= _row_ends(offsets, starts)] if len(starts) else starts
        for step, token in enumerate(sequence[1:], start=1):
            starts = starts[values[starts + step] == token]
        found += [starts + step for step in range(len(sequence))]
    if not found:
        return np.zeros(0, dtype=np.int64)
    flat = np.unique(np.concatenate(found))
    scaffold[np.isin(supervised, flat, assume_unique=True)] = True
    return flat


def _separators(
    tables: CountTables,
    values: NDArray[Any],
    offsets: NDArray[Any],
    supervised: NDArray[np.int64],
    kinds: NDArray[np.uint8],
    scaffold: NDArray[np.bool_],
    sequence_flat: NDArray[np.int64],
) -> None:
    where = np.flatnonzero((kinds == SPACE) & ~scaffold)
    if not len(where):
        return
    flat = supervised[where]
    row = np.searchsorted(offsets, flat, side="right") - 1
    has_left, has_right = flat > offsets[row], flat + 1 < offsets[row + 1]
    left, right = np.where(has_left, flat - 1, flat), np.where(has_right, flat + 1, flat)

    def marked(at: NDArray[np.int64]) -> NDArray[np.bool_]:
        single = np.take(tables.kinds, values[at], mode="clip") == MARKER
        return np.asarray(single | np.isin(at, sequence_flat) if len(sequence_flat) else single)

    near = (has_left & marked(left)) | (has_right & marked(right))
    separators = flat[near]
    rest = ~near
    chained = (has_left & _in_sorted(left, separators)) | (has_right & _in_sorted(right, separators))
    scaffold[where[near | (rest & chained)]] = True


def _in_sorted(wanted: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.bool_]:
    if not len(among):
        return np.zeros(len(wanted), dtype=np.bool_)
    at = np.minimum(np.searchsorted(among, wanted), len(among) - 1)
    return np.asarray(among[at] == wanted)


def _row_ends(offsets: NDArray[Any], flat: NDArray[np.int64]) -> NDArray[Any]:
    return np.asarray(offsets[np.searchsorted(offsets, flat, side="right")])


def count_one(tables: CountTables, ids: Sequence[int], mask: Sequence[int]) -> SupervisedCounts:
    """`count_many` for one row. Raises ValueError when ids and mask differ in length."""
    if len(ids) != len(mask):
        raise ValueError(f"{len(ids)} ids but {len(mask)} mask entries")
    offsets = np.array([0, len(ids)])
    counts = count_many(tables, np.asarray(ids, dtype=np.int64), offsets, np.asarray(mask))
    return SupervisedCounts(*(int(count[0]) for count in counts))
