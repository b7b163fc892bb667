"""Tokenized rows in columns agree with a plain loop, and every fault of the arrays has its reason."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.validation.reasons import Reason
from tasks.validation.tally import mark_duplicates
from tasks.validation.tokenized import CODE, CODES, TokenPart, TokenRules, row_hashes, scan
from validation_rows import SmallTarget

TARGET = SmallTarget()


KINDS = (pa.int32(), pa.int8())


def run(ids: list[Any], mask: list[Any], *, labels: bool = False, kinds: tuple[Any, Any] = KINDS) -> TokenPart:
    rules = TokenRules(2, TARGET.vocab_size, TARGET.count_many)
    arrays = (pa.array(ids, pa.large_list(kinds[0])), pa.array(mask, pa.large_list(kinds[1])))
    return scan(*arrays, rules, labels=labels, first_row=0, source="s")


def reasons(part: TokenPart) -> list[Reason | None]:
    return [CODES[code] for code in part.codes]


ROWS = st.lists(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 1)), max_size=12), min_size=1, max_size=12)


@given(ROWS)
def test_counts_agree_with_a_plain_loop(rows: list[list[tuple[int, int]]]) -> None:
    part = run([[i for i, _ in row] for row in rows], [[m for _, m in row] for row in rows])
    for at, row in enumerate(rows):
        expected = sum(m for _, m in row)
        assert part.n_supervised[at] == expected
        if not row:
            assert reasons(part)[at] is Reason.EMPTY_ROW
            continue
        few = int(part.n_content[at]) < 2
        assert reasons(part)[at] is (Reason.TOO_FEW_SUPERVISED_TOKENS if few else None)
        markers = sum(m for i, m in row if i in (1, 2, 3))
        assert markers <= part.n_scaffold[at] <= markers + sum(m for i, m in row if i == 4)


def test_each_fault_of_the_arrays_has_its_reason() -> None:
    ids = [[11, 12, 13, 14], [11, 12], [11, 12, 13], [11, 12, 13], [], None, [11, 100, 12], [11, -1, 12], [11, None, 3]]
    mask = [[0, 0, 1], [0, 1, 1], [0, 2, 1], [0, 1, 1], [], [1], [0, 1, 1], [0, 1, 1], [1, 1, 1]]
    assert reasons(run(ids, mask)) == [
        Reason.LENGTH_MISMATCH,
        Reason.LENGTH_MISMATCH,
        Reason.MASK_NOT_BINARY,
        None,
        Reason.EMPTY_ROW,
        Reason.NULL_ROW,
        Reason.ID_OUT_OF_RANGE,
        Reason.ID_OUT_OF_RANGE,
        Reason.BAD_IDS,
    ]  # fmt: skip


def test_labels_are_a_mask_unless_they_are_shifted() -> None:
    ids = [[10, 11, 12, 13], [10, 11, 12, 13]]
    labels = [[-100, -100, 12, 13], [-100, 12, 13, -100]]
    part = run(ids, labels, labels=True, kinds=(pa.int64(), pa.int64()))
    assert reasons(part) == [None, Reason.LABELS_DIFFER]
    assert part.n_supervised[0] == 2


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.bool_()])
def test_masks_of_any_integer_type_count_the_same(kind: pa.DataType) -> None:
    mask = [[0, 1, 1, 1], [1, 1, 1, 1]]
    values = [[bool(m) for m in row] for row in mask] if kind == pa.bool_() else mask
    part = run([[10, 11, 12, 3], [10, 11, 12, 3]], values, kinds=(pa.int64(), kind))
    assert part.n_supervised.tolist() == [3, 4] and part.n_scaffold.tolist() == [1, 1]


def test_slices_and_fixed_size_lists_are_read_in_place() -> None:
    ids = pa.array([[9, 9, 9], [10, 11, 12], [13, 14, 3]], pa.list_(pa.int32(), 3))
    mask = pa.array([[1, 1, 1], [0, 1, 1], [1, 1, 1]], pa.list_(pa.int8()))
    part = scan(ids.slice(1), mask.slice(1), TokenRules(2), labels=False, first_row=1, source="s")
    assert part.n_supervised.tolist() == [2, 3] and part.rows.tolist() == [1, 2]


def test_the_incident_is_found_with_its_scaffold() -> None:
    bad, good = [5, 20, 3, 5, 4, 2, 4, 30, 31, 3], [5, 20, 3, 5, 1, *range(40, 60), 2, 50, 51, 3]
    ids = [bad] * 87 + [[*good[:-1], i % 90 + 6] for i in range(13)]
    mask = [[0] * 4 + [1] * 6] * 87 + [[0] * 4 + [1] * (len(good) - 4)] * 13
    part = scan(
        pa.array(ids, pa.large_list(pa.int32())), pa.array(mask, pa.large_list(pa.int8())),
        TokenRules(8, TARGET.vocab_size, TARGET.count_many), labels=False, first_row=0, source="s",
    )  # fmt: skip
    assert (part.codes[:87] == CODE[Reason.TOO_FEW_SUPERVISED_TOKENS]).all() and not part.codes[87:].any()
    assert (part.n_supervised[:87] == 6).all() and (part.n_scaffold[:87] == 4).all()
    assert part.example == (0, [4, 2, 4, 30, 31, 3])


def test_hashes_tell_rows_apart_and_agree_over_types() -> None:
    values, offsets = np.array([1, 2, 3, 1, 2, 3, 4], np.int32), np.array([0, 3, 6, 7, 7])
    hashes = row_hashes(values, offsets)
    assert hashes[0] == hashes[1] and len(set(hashes.tolist())) == 3
    assert (row_hashes(values.astype(np.int64), offsets) == hashes).all()


def test_duplicates_are_found_over_parts_and_name_the_first() -> None:
    first, second = run([[10, 11, 12]], [[1, 1, 1]]), run([[10, 11, 12], [10, 11, 13]], [[1, 1, 1], [1, 1, 1]])
    second.source = "t"
    twins = mark_duplicates([first, second])
    assert reasons(first) == [None] and reasons(second) == [Reason.DUPLICATE, None]
    assert twins == [{}, {0: "s:0"}]
