"""Word n-grams: decontamination against benchmarks, and shingles for near duplicates."""

import re
from collections.abc import Iterable, Iterator

import xxhash

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Lower-case words, punctuation dropped: what a re-typed benchmark question still has in common."""
    return _WORD.findall(text.lower())


def ngrams(text: str, width: int) -> Iterator[int]:
    """64-bit hashes of all runs of `width` words. A shorter text has none: it cannot prove contamination."""
    found = words(text)
    for start in range(len(found) - width + 1):
        yield xxhash.xxh3_64_intdigest(" ".join(found[start : start + width]).encode())


def shingles(text: str, width: int = 5) -> list[bytes]:
    """Distinct runs of `width` words (all words of a shorter text), for MinHash."""
    found = words(text)
    if len(found) <= width:
        return [" ".join(found).encode()]
    return list({" ".join(found[i : i + width]).encode() for i in range(len(found) - width + 1)})


def benchmark_ngrams(texts: Iterable[str], width: int) -> set[int]:
    """n-grams of a benchmark's texts. A question shorter than `width` words cannot be matched."""
    return {gram for text in texts for gram in ngrams(text, width)}
