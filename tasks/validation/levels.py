"""Repetition and definition levels of Parquet pages, read as runs: where rows begin, and that nothing is null or empty.

Format: https://parquet.apache.org/docs/file-format/data-pages/encodings/#RLE (run-length and bit-packed hybrid).
"""

import numpy as np
from numpy.typing import NDArray

from tasks.validation.thrift import varint

ONE_BYTE_PACKED = 3
"""Header of a packed run of eight values: a row start and what follows it."""

ROW_THEN_SEVEN = 0xFE
"""Such a run's values where a row begins: level 0, then seven times 1."""


class OtherLayoutError(ValueError):
    """The column is laid out in a way that only Arrow reads."""


def check_definition(levels: memoryview, count: int, most: int) -> None:
    """Raises OtherLayoutError unless `count` values have the highest level: nothing null, nothing empty."""
    at = covered = 0
    bits = most.bit_length()
    while covered < count:
        header, at = varint(levels, at)
        number = header >> 1
        if header & 1:
            flags = np.unpackbits(np.frombuffer(levels[at : at + number * bits], np.uint8), bitorder="little")
            found = flags.reshape(-1, bits) @ (1 << np.arange(bits))
            fine, at, covered = bool((found[: count - covered] == most).all()), at + number * bits, covered + len(found)
        else:
            fine, at, covered = levels[at] == most, at + 1, covered + number
        if not fine or not number or bits > 8:
            raise OtherLayoutError("some rows are null or empty, or have nulls")


def row_starts(levels: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """Where the repetition level is 0, from its runs (bit width 1): a run-length run has a header and a byte, a packed
    run has a header and 8 values a byte. Raises OtherLayoutError when they do not cover `count` values.
    """
    size = len(levels)
    padded = np.concatenate((levels, np.zeros(5, np.uint8)))
    at_run = _guessed_runs(padded, size)
    header, width = _headers(padded, at_run)
    after = _after(at_run, header, width)
    if not len(after) or after[-1] != size or not np.array_equal(after[:-1], at_run[1:]):
        at_run = _walked_runs(padded, size)
        header, width = _headers(padded, at_run)
    packed, number = (header & 1).astype(np.bool_), header >> 1
    counts = np.where(packed, number * 8, number)
    ends = np.cumsum(counts)
    begins, payload = ends - counts, at_run + width
    if not len(ends) or ends[-1] < count:
        raise OtherLayoutError("the repetition levels end too early")
    first = padded[payload]
    if np.array_equal(packed, first == ROW_THEN_SEVEN) and (number[packed] == 1).all() and first.all():
        found = begins[packed]
    else:
        found = _zeros(padded, begins, counts, payload, packed)
    return np.asarray(found[: int(np.searchsorted(found, count))])


def _zeros(
    padded: NDArray[np.uint8],
    begins: NDArray[np.int64],
    counts: NDArray[np.int64],
    payload: NDArray[np.int64],
    packed: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Positions of level 0 in any runs."""
    groups = counts[packed] >> 3
    within = _within(groups)
    flags = np.unpackbits(padded[np.repeat(payload[packed], groups) + within], bitorder="little")
    zero_bits = np.flatnonzero(flags == 0)
    found = (np.repeat(begins[packed], groups) + 8 * within)[zero_bits >> 3] + (zero_bits & 7)
    zeros = ~packed & (padded[payload] == 0)
    if zeros.any():
        single = np.repeat(begins[zeros], counts[zeros]) + _within(counts[zeros])
        found = np.sort(np.concatenate((found, single)))
    return np.asarray(found)


def _guessed_runs(padded: NDArray[np.uint8], size: int) -> NDArray[np.int64]:
    """Where runs begin if every row begins in a packed run of one byte, as writers do it for rows of 16 values or more.

    Right when every run ends where the next one begins.
    """
    single = np.flatnonzero((padded[:size] == ONE_BYTE_PACKED) & (padded[1 : size + 1] > 1))
    at_run = np.empty(2 * len(single) + 1, np.int64)
    at_run[0], at_run[1::2], at_run[2::2] = 0, single, single + 2
    return at_run[int(len(single) > 0 and single[0] == 0) : len(at_run) - int(at_run[-1] == size)]


def _walked_runs(padded: NDArray[np.uint8], size: int) -> NDArray[np.int64]:
    """Where runs begin, one after the other."""
    everywhere = np.arange(size)
    after = _after(everywhere, *_headers(padded, everywhere)).tolist()
    runs, at = [], 0
    while at < size:
        runs.append(at)
        at = after[at]
    if at > size:
        raise OtherLayoutError("the last run of repetition levels is cut off")
    return np.array(runs, np.int64)


def _after(at: NDArray[np.int64], header: NDArray[np.int64], width: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the runs that begin at `at` end."""
    return np.asarray(at + width + np.where(header & 1, header >> 1, 1))


def _headers(padded: NDArray[np.uint8], at: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(value, bytes) of the variable-length numbers that begin at `at`; at most four bytes count."""
    first = padded[at].astype(np.int64)
    header, more = first & 127, first > 127
    width = 1 + more
    for step in range(1, 4):
        if not more.any():
            break
        follows = padded[at + step].astype(np.int64)
        header += np.where(more, (follows & 127) << 7 * step, 0)
        more = more & (follows > 127) if step < 3 else np.zeros_like(more)
        width += more
    return header, width


def _within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 … n − 1 for every n in `counts`, one after the other."""
    ends = np.cumsum(counts)
    return np.asarray(np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts))
