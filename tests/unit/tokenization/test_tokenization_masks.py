"""Boundaries from token bytes are boundaries from offsets; where bytes cannot tell, offsets are used."""

import unicodedata

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from targets import custom_target, qwen36, small_tokenizer
from tasks.tokenization.answers import Span
from tasks.tokenization.masks import first_by_bytes, first_sampled, flat_mask

TEXT = st.lists(
    st.one_of(st.text(max_size=6), st.sampled_from(["\n", "\n\n", "<|im_end|>", "é", "e\u0301", "数学", " the", "🙂"])),
    min_size=1,
    max_size=8,
).map(lambda parts: "".join(parts).encode("utf-8", "ignore").decode())


def plain(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@settings(max_examples=200, deadline=None)
@given(before=TEXT, after=TEXT)
def test_the_first_token_is_the_first_that_begins_at_or_after_the_boundary(before: str, after: str):
    target = qwen36()
    text = plain(f"x{before}{after}")
    span = Span(text, min(len(before) + 1, len(text)), False, "")
    ids = np.asarray(target.encode(text), dtype=np.int32)
    first = first_by_bytes(target.byte_lengths, ids, span)
    assert first is not None
    size = len(text[: span.start].encode())
    assert sum(target.byte_lengths[ids[:first]]) >= size
    assert first == 0 or sum(target.byte_lengths[ids[: first - 1]]) < size


@settings(max_examples=100, deadline=None)
@given(before=TEXT, after=TEXT)
def test_bytes_and_offsets_agree_behind_a_control_token(before: str, after: str):
    target = qwen36()
    before, after = plain(f"{before}<|im_start|>"), plain(after)
    span = Span(before + after, len(before), False, "")
    encoding = target.tokenizer.encode(span.text, add_special_tokens=False)
    first = first_by_bytes(target.byte_lengths, np.asarray(encoding.ids, dtype=np.int32), span)
    if unicodedata.is_normalized("NFC", span.text):
        assert first == first_sampled(encoding, span)
        assert target.decode(encoding.ids[first:]) == after
    else:
        assert first is None


def test_text_that_the_normalizer_changes_is_left_to_offsets():
    target = qwen36()
    span = Span("<|im_start|>cafe\u0301", 12, False, "")
    ids = np.asarray(target.encode(span.text), dtype=np.int32)
    assert first_by_bytes(target.byte_lengths, ids, span) is None


def test_a_token_that_swallows_white_space_is_left_to_offsets():
    tokenizer = small_tokenizer(["<|im_end|>", "<|im_start|>"], [])
    tokenizer.add_tokens([AddedToken("<|eat|>", rstrip=True, normalized=False)])
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    target = custom_target("eats", template, tokenizer, "<|im_end|>")
    span = Span("ab<|eat|>   cd", 12, False, "")
    encoding = target.tokenizer.encode(span.text, add_special_tokens=False)
    ids = np.asarray(encoding.ids, dtype=np.int32)
    assert sum(target.byte_lengths[ids]) < len(span.text.encode())
    assert first_by_bytes(target.byte_lengths, ids, span) is None
    assert target.decode(ids[first_sampled(encoding, span) :].tolist()) == "cd"


def test_spans_of_every_kind_become_ones():
    offsets = np.array([0, 3, 3, 7])
    assert flat_mask([(1, 3), (0, 0), (0, 4)], offsets).tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert flat_mask([], np.array([0])).tolist() == []
