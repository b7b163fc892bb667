"""From character positions to tokens, and from spans to masks."""

import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from tasks.tokenization.answers import Span
from tasks.tokenization.items import Ids


def first_sampled(encoding: Encoding, span: Span) -> int:
    """Index of the first token that lies wholly in the sampled text.

    A token that the tokenizer merged across the boundary is not supervised: the target never sampled it after this
    prompt.
    """
    if span.start >= len(span.text):
        return len(encoding)
    token = encoding.char_to_token(span.start)
    if token is None:
        return next((i for i, (start, _) in enumerate(encoding.offsets) if start >= span.start), len(encoding))
    chars = encoding.token_to_chars(token)
    return int(token) + (1 if chars is not None and chars[0] < span.start else 0)


def first_by_bytes(lengths: NDArray[np.int32], ids: Ids, span: Span) -> int | None:
    """`first_sampled` from the bytes that tokens stand for; None when they do not add up to the text.

    They do not where a normalizer changed the text or a token swallowed white space: then real offsets are needed.
    """
    if not unicodedata.is_normalized("NFC", span.text):
        return None
    sizes = lengths[ids]
    ends = np.cumsum(sizes)
    if not len(ends) or int(ends[-1]) != len(span.text.encode()):
        return None
    return int(np.searchsorted(ends - sizes, len(span.text[: span.start].encode())))


def flat_mask(spans: Sequence[tuple[int, int]], offsets: NDArray[np.int64]) -> NDArray[np.int8]:
    """Ones in [start, end) of every row, zeros elsewhere, as one flat array."""
    steps = np.zeros(int(offsets[-1]) + 1, dtype=np.int8)
    bounds = np.asarray(spans, dtype=np.int64).reshape(-1, 2) + offsets[:-1, None]
    np.add.at(steps, bounds[:, 0], 1)
    np.subtract.at(steps, bounds[:, 1], 1)
    return np.cumsum(steps[:-1], dtype=np.int8)
