"""Does a sequence repeat itself? On token ids, or on words where there are no ids. Vectorised, pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GRAM = 16  # tokens that must agree to count as a repetition
BLOCK = 192  # tokens looked at together
LEAST = 128  # shorter answers are never called loops
DISTINCT_SHARE = 0.2  # a loop of r rounds has 1/r distinct grams
RUN_OF_ZERO = 32  # token 0 is what NaN logits sample
RUN_OF_ANY = 256


def as_array(ids: Sequence[int] | None, text: str) -> NDArray[np.int64]:
    """Token ids, or stand-ins for words."""
    if ids is not None:
        return np.asarray(ids, dtype=np.int64)
    numbers: dict[str, int] = {}
    return np.fromiter((numbers.setdefault(word, len(numbers) + 1) for word in text.split()), dtype=np.int64)


def longest_run(values: NDArray[np.int64]) -> tuple[int, int]:
    """(token, length) of the longest run of one value; (0, 0) for nothing."""
    if values.size == 0:
        return 0, 0
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    starts = np.concatenate(([0], edges))
    lengths = np.diff(np.concatenate((starts, [values.size])))
    best = int(lengths.argmax())
    return int(values[starts[best]]), int(lengths[best])


def single_token_run(values: NDArray[np.int64], *, known_ids: bool) -> str | None:
    """What runs on, if anything."""
    token, length = longest_run(values)
    if known_ids and token == 0 and length >= RUN_OF_ZERO:
        return f"token 0 {length} times in a row (NaN logits)"
    return f"one token ({token}) {length} times in a row" if length >= RUN_OF_ANY else None


def distinct_share(values: NDArray[np.int64]) -> float:
    """Least share of distinct 16-grams in any block of 512 tokens; 1.0 for what is too short to judge."""
    if values.size < LEAST:
        return 1.0
    hashes = np.zeros(values.size - GRAM + 1, dtype=np.uint64)
    mixed = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for offset in range(GRAM):
        hashes = hashes * np.uint64(1099511628211) + mixed[offset : offset + hashes.size]
    starts = range(0, max(1, hashes.size - BLOCK + 1), BLOCK // 4)
    shares = [_share(hashes[start : start + BLOCK]) for start in starts]
    if hashes.size > BLOCK:
        shares.append(_share(hashes[-BLOCK:]))
    return min(shares)


def _share(block: NDArray[np.uint64]) -> float:
    return float(np.unique(block).size / block.size)


def repeats(values: NDArray[np.int64]) -> str | None:
    """Evidence of a loop, or None. Tables and lists whose items differ do not repeat 16 tokens at a time."""
    share = distinct_share(values)
    if share < DISTINCT_SHARE:
        return f"only {share:.0%} of the {GRAM}-grams in some {BLOCK} tokens are distinct"
    return None
