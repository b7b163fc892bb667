"""Counting without a loop over rows gives what a plain loop gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from targets import CHATML, custom_target, family_target, small_tokenizer
from tasks.target.counts import MARKER, SPACE, CountTables, count_many, count_one

TABLES = CountTables(np.array([0, 0, MARKER, SPACE, MARKER, SPACE, 0, 0], dtype=np.uint8), ((6, 7, 1), (6, 7)))
ROWS = st.lists(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1)), max_size=12), min_size=1, max_size=6)


def plain(row: list[tuple[int, int]]) -> tuple[int, int, int]:
    """The definition, one token at a time."""
    ids, mask = [i for i, _ in row], [m for _, m in row]
    marker = [TABLES.kinds[i] == MARKER for i in ids]
    for sequence in TABLES.sequences:
        for start in range(len(ids) - len(sequence) + 1):
            if mask[start] and tuple(ids[start : start + len(sequence)]) == sequence:
                marker[start : start + len(sequence)] = [True] * len(sequence)

    def near(index: int, among: list[bool]) -> bool:
        return any(0 <= at < len(ids) and among[at] for at in (index - 1, index + 1))

    space = [TABLES.kinds[i] == SPACE and bool(m) and not k for i, m, k in zip(ids, mask, marker, strict=True)]
    first = [space[i] and near(i, marker) for i in range(len(ids))]
    second = [space[i] and near(i, first) for i in range(len(ids))]
    supervised = sum(mask)
    scaffold = sum(1 for i, m in enumerate(mask) if m and (marker[i] or first[i] or second[i]))
    return supervised, scaffold, supervised - scaffold


@settings(max_examples=400, deadline=None)
@given(rows=ROWS)
def test_many_rows_at_once_count_like_one_row_at_a_time(rows):
    values = np.array([i for row in rows for i, _ in row], dtype=np.int32)
    mask = np.array([m for row in rows for _, m in row], dtype=np.int8)
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    found = list(zip(*(counts.tolist() for counts in count_many(TABLES, values, offsets, mask)), strict=True))
    assert found == [plain(row) for row in rows]


def test_offsets_of_a_slice_and_boolean_masks():
    values, mask = np.array([9, 9, 2, 3, 0, 4], dtype=np.int32), np.array([1, 1, 1, 1, 1, 1], dtype=bool)
    counts = count_many(TABLES, values, np.array([2, 6]), mask)
    assert [c.tolist() for c in counts] == [[4], [3], [1]]


def test_unequal_lengths_are_an_error():
    with pytest.raises(ValueError, match="3 ids but 2 mask"):
        count_one(TABLES, [1, 2, 3], [0, 1])


def test_markers_of_several_tokens_are_scaffold_too():
    """A tokenizer without think tokens of its own, as some distilled models have."""
    template = CHATML.replace("{% for", "{# <think> </think> <tool_call> #}{% for", 1)
    tokenizer = small_tokenizer(["<|im_end|>", "<|im_start|>"], ["<tool_call>"])
    target = custom_target("no-think-tokens", template, tokenizer, "<|im_end|>")
    assert len(target.encode("</think>")) > 1 and target.family.think_close == "</think>"
    sampled = target.encode("the light\n</think>\n\nis scattered<|im_end|>")
    counts = target.count(sampled, [1] * len(sampled))
    assert counts.n_content == len(target.encode("the light")) + len(target.encode("is scattered"))


def test_channels_of_harmony_are_scaffold():
    target = family_target("gptoss")
    text = "<|channel|>analysis<|message|>the light<|end|><|start|>assistant<|channel|>final<|message|>is<|return|>"
    ids = target.encode(text)
    assert target.count(ids, [1] * len(ids)).n_content == len(target.encode("the light")) + len(target.encode("is"))
