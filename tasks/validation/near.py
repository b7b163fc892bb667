"""Near duplicates of prompts: MinHash over word shingles, through datasketch (the extra `dedup`)."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tasks.errors import SpecError
from tasks.validation.canonical import Turn
from tasks.validation.overlap import shingles

PERMUTATIONS = 128
"""Of a signature: the standard error of the Jaccard estimate is 1/√128 ≈ 0.09; 512 bytes a prompt."""


SCHEME = "affine32"
"""datasketch's permutations with 32-bit values (its default since 2.0)."""


@cache
def _datasketch() -> Any:
    try:
        import datasketch
    except ImportError as error:
        raise SpecError("source.near_duplicates needs the package datasketch: install drafter-regen[dedup]") from error
    return datasketch


def signature(turns: Sequence[Turn]) -> bytes:
    """The MinHash of a prompt's user texts, as uint32 values."""
    sketch = _datasketch().MinHash(num_perm=PERMUTATIONS, scheme=SCHEME)
    sketch.update_batch(shingles("\n".join(turn[1] for turn in turns if turn[0] == "user")))
    return np.asarray(sketch.hashvalues, dtype=np.uint32).tobytes()


def _read(raw: bytes) -> Any:
    values = np.frombuffer(raw, dtype=np.uint32)
    return _datasketch().MinHash(num_perm=PERMUTATIONS, hashvalues=values, scheme=SCHEME)


def near_duplicates(signatures: Sequence[tuple[list[str], bytes]], threshold: float) -> dict[str, str]:
    """{id: id of the earlier prompt it nearly repeats}, in input order; exact repeats of an id are left out.

    A signature comes with the ids of all samples of its row: they go together.

    Holds the signatures and the LSH index in memory: about 3 kB a prompt.
    """
    if not signatures:
        return {}
    datasketch = _datasketch()
    index = datasketch.MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
    kept: dict[str, Any] = {}
    twins: dict[str, str] = {}
    for ids, raw in signatures:
        prompt_id = ids[0]
        if prompt_id in kept or prompt_id in twins:
            continue
        sketch = _read(raw)
        similar = [other for other in index.query(sketch) if sketch.jaccard(kept[other]) >= threshold]
        if similar:
            nearest = max(similar, key=lambda other: (sketch.jaccard(kept[other]), other))
            twins |= dict.fromkeys(ids, nearest)
            continue
        index.insert(prompt_id, sketch)
        kept[prompt_id] = sketch
    return twins
