"""Tokenized rows, judged in columns: lengths, masks, labels, ids, and supervised tokens under the target's template.

Nothing here loops over rows; work is a few passes over flat arrays, and grows with the tokens that are supervised.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from tasks.validation.policy import Policy
from tasks.validation.reasons import Reason, RowError
from tasks.validation.spill import Collected

CODES: tuple[Reason | None, ...] = (
    None,
    Reason.NULL_ROW,
    Reason.EMPTY_ROW,
    Reason.LENGTH_MISMATCH,
    Reason.BAD_IDS,
    Reason.ID_OUT_OF_RANGE,
    Reason.MASK_NOT_BINARY,
    Reason.LABELS_DIFFER,
    Reason.TOO_FEW_SUPERVISED_TOKENS,
    Reason.DUPLICATE,
)
"""What a row's code stands for; 0 is fine."""

CODE = {reason: index for index, reason in enumerate(CODES) if reason}
MOST_IDS = 1 << 31
"""Without a target: ids are written as int32."""

IGNORED_LABEL = -100
"""The label that PyTorch's cross entropy skips; Hugging Face trainers use it for unsupervised tokens."""

TokenRow = tuple[int, str | None, Any, Any]
"""Row number, the id it brought along, input_ids, and the mask or the labels."""

CountMany = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The floor, the vocabulary and the target's way of counting. Without a target nothing is known to be scaffold."""

    min_content_tokens: int
    vocab_size: int | None = None
    count_many: CountMany | None = None


@dataclass(slots=True)
class TokenPart:
    """Columns about the rows of one unit, in order. Counts are 0 where a row's code is structural."""

    source: str
    rows: NDArray[np.int64]
    codes: NDArray[np.uint8]
    n_tokens: NDArray[np.int32]
    n_supervised: NDArray[np.int32]
    n_scaffold: NDArray[np.int32]
    hashes: NDArray[np.uint64]
    ids: pa.Array | None = None
    example: tuple[int, list[int]] | None = None  # (index, supervised ids) of the first row below the floor

    @property
    def n_content(self) -> NDArray[np.int32]:
        """Supervised tokens that are not the template's scaffold."""
        return self.n_supervised - self.n_scaffold


def rules_of(policy: Policy) -> TokenRules:
    """The rules for one validation."""
    floor, target = policy.settings.min_content_tokens, policy.target
    if target is None:
        return TokenRules(floor)
    target.count_many(np.zeros(1, np.int32), np.array([0, 1]), np.ones(1, np.bool_))  # builds its tables, once
    return TokenRules(floor, target.vocab_size, target.count_many)


def scan(ids: pa.Array, mask: pa.Array, rules: TokenRules, *, labels: bool, first_row: int, source: str) -> TokenPart:
    """Judge one batch. `labels`: `mask` holds labels (−100 or the token at its own position)."""
    n = len(ids)
    part = TokenPart(
        source,
        np.arange(first_row, first_row + n, dtype=np.int64),
        np.zeros(n, np.uint8),
        np.zeros(n, np.int32),
        np.zeros(n, np.int32),
        np.zeros(n, np.int32),
        np.zeros(n, np.uint64),
    )
    structural = _structure(ids, mask)
    good = np.flatnonzero(structural == 0)
    part.codes[:] = structural
    if len(good) < n:
        ids, mask = ids.take(pa.array(good)), mask.take(pa.array(good))
    if len(good):
        _judge(ids, mask, rules, labels, part, good if len(good) < n else slice(None))
    return part


def _structure(ids: pa.Array, mask: pa.Array) -> NDArray[np.uint8]:
    codes = np.zeros(len(ids), np.uint8)
    lengths, mask_lengths = _lengths(ids), _lengths(mask)
    codes[lengths != mask_lengths] = CODE[Reason.LENGTH_MISMATCH]
    codes[lengths == 0] = CODE[Reason.EMPTY_ROW]
    for array in (ids, mask):
        if array.null_count:
            codes[array.is_null().to_numpy(zero_copy_only=False)] = CODE[Reason.NULL_ROW]
        if array.flatten().null_count:
            holes = array.flatten().is_null().to_numpy(zero_copy_only=False)
            codes[_rows_with(holes, _offsets(array)) & (codes == 0)] = CODE[Reason.BAD_IDS]
    return codes


def _offsets(array: pa.Array) -> NDArray[np.int64]:
    """Row bounds in `array.flatten()`; a null row has length 0 there."""
    return np.concatenate(([0], np.cumsum(_lengths(array), dtype=np.int64)))


def _lengths(array: pa.Array) -> NDArray[np.int64]:
    if pa.types.is_fixed_size_list(array.type):
        lengths = np.full(len(array), array.type.list_size, np.int64)
    else:
        lengths = np.diff(array.offsets.to_numpy()).astype(np.int64, copy=False)
    if array.null_count:
        lengths = np.where(array.is_null().to_numpy(zero_copy_only=False), 0, lengths)
    return lengths


def _rows_with(flat: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray(np.diff(np.searchsorted(np.flatnonzero(flat), offsets)) > 0)


def _judge(
    ids: pa.Array, mask: pa.Array, rules: TokenRules, labels: bool, part: TokenPart, where: NDArray[Any] | slice
) -> None:
    offsets = _offsets(ids)
    values, marks = ids.flatten().to_numpy(), mask.flatten().to_numpy(zero_copy_only=False)
    codes = np.zeros(len(ids), np.uint8)
    # As unsigned, a negative id is large (from half of the type's range on): one pass finds both.
    unsigned = values.view(f"u{values.itemsize}")
    limit = min(rules.vocab_size or MOST_IDS, 1 << (8 * values.itemsize - (values.dtype.kind == "i")))
    if int(unsigned.max()) >= limit:
        codes[_rows_with(unsigned >= limit, offsets)] = CODE[Reason.ID_OUT_OF_RANGE]
    supervised = _supervised(values, marks, offsets, labels, codes)
    n_supervised, n_scaffold = _counts(values, offsets, supervised, rules)
    few = (n_supervised - n_scaffold < rules.min_content_tokens) & (codes == 0)
    codes[few] = CODE[Reason.TOO_FEW_SUPERVISED_TOKENS]
    if few.any():
        at = int(few.argmax())
        row = slice(offsets[at], offsets[at + 1])
        index = at if isinstance(where, slice) else int(where[at])
        part.example = (index, values[row][supervised[row]].tolist())
    part.codes[where] = codes
    part.n_tokens[where] = np.diff(offsets)
    part.n_supervised[where] = n_supervised
    part.n_scaffold[where] = n_scaffold
    part.hashes[where] = row_hashes(values, offsets) ^ _mask_hashes(supervised, offsets)


def _supervised(
    values: NDArray[Any], marks: NDArray[Any], offsets: NDArray[np.int64], labels: bool, codes: NDArray[np.uint8]
) -> NDArray[np.bool_]:
    if labels:
        supervised = np.asarray(marks != IGNORED_LABEL)
        wrong = supervised & (marks != values)
        if wrong.any():
            codes[_rows_with(wrong, offsets)] = CODE[Reason.LABELS_DIFFER]
        return supervised
    if marks.dtype == np.bool_:
        return marks
    if int(marks.view(f"u{marks.itemsize}").max()) > 1:
        codes[_rows_with((marks != 0) & (marks != 1), offsets)] = CODE[Reason.MASK_NOT_BINARY]
        return np.asarray(marks == 1)
    return marks.view(np.bool_) if marks.itemsize == 1 else np.asarray(marks != 0)


def _counts(
    values: NDArray[Any], offsets: NDArray[np.int64], supervised: NDArray[np.bool_], rules: TokenRules
) -> tuple[NDArray[Any], NDArray[Any]]:
    if rules.count_many is None:
        found = np.diff(np.searchsorted(np.flatnonzero(supervised), offsets))
        return found, np.zeros_like(found)
    n_supervised, n_scaffold, _ = rules.count_many(values, offsets, supervised)
    return n_supervised, n_scaffold


def row_hashes(values: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64-bit hash of every row's ids (as int32), by polars over a binary view of the same memory."""
    values = np.ascontiguousarray(values.astype(np.int32, copy=False))
    bounds = pa.py_buffer(np.ascontiguousarray(offsets * 4))
    view = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, [None, bounds, pa.py_buffer(values)])
    return np.asarray(pl.Series(pl.from_arrow(view)).hash(seed=0).to_numpy())


def _mask_hashes(supervised: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64-bit hash of which tokens are supervised: rows that supervise other turns of one conversation are no copies."""
    bounds, flags = pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(supervised).view(np.uint8))
    view = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, [None, bounds, flags])
    return np.asarray(pl.Series(pl.from_arrow(view)).hash(seed=1).to_numpy())


@dataclass(slots=True)
class TokenRows:
    """Tokenized rows of JSON lines, collected for one columnar judgement (rows with a mask, and rows with labels)."""

    source: str
    masked: list[TokenRow] = field(default_factory=list)
    labelled: list[TokenRow] = field(default_factory=list)

    def add(self, number: int, row_id: str | None, row: dict[str, Any]) -> None:
        """One row with `input_ids` and `loss_mask` or `labels`."""
        mask = row.get("loss_mask")
        if mask is None:
            self.labelled.append((number, row_id, row["input_ids"], row.get("labels")))
        else:
            self.masked.append((number, row_id, row["input_ids"], mask))

    def judge(self, policy: Policy, collected: Collected) -> list[TokenPart]:
        """Parts for the tally; where one regenerates, prompts and rejects go into `collected` as well."""
        parts = []
        for rows, labels in ((self.masked, False), (self.labelled, True)):
            good = [row for row in rows if _check_types(row, collected)]
            if not good:
                continue
            numbers, row_ids, ids, masks = zip(*good, strict=True)
            array, marks = pa.array(ids, pa.large_list(pa.int64())), pa.array(masks, pa.large_list(pa.int64()))
            part = scan(array, marks, rules_of(policy), labels=labels, first_row=0, source=self.source)
            part.rows, part.ids = np.array(numbers, np.int64), pa.array(row_ids, pa.string())
            parts.append(part)
            if not policy.for_training:
                decode_prompts(array, part, policy, collected)
        return parts


def _check_types(row: TokenRow, collected: Collected) -> bool:
    number, row_id, ids, mask = row
    if mask is None:
        collected.reject(number, row_id, RowError(Reason.NULL_ROW, "no loss_mask and no labels"))
    elif not (_is_ints(ids) and _is_ints(mask)):
        collected.reject(number, row_id, RowError(Reason.BAD_IDS, "expected two lists of integers"))
    else:
        return True
    return False


def _is_ints(value: Any) -> bool:
    return type(value) is list and all(type(item) is int and -(2**63) <= item < 2**63 for item in value)


def decode_prompts(ids: pa.Array, part: TokenPart, policy: Policy, collected: Collected) -> None:
    """Tokenized rows back to prompts, at the target's turn headers. A bad mask is the old response's fault only."""
    row_ids = part.ids.to_pylist() if part.ids is not None else [None] * len(ids)
    unusable = {CODE[r] for r in (Reason.NULL_ROW, Reason.EMPTY_ROW, Reason.BAD_IDS, Reason.ID_OUT_OF_RANGE)}
    for at, (number, code) in enumerate(zip(part.rows.tolist(), part.codes.tolist(), strict=True)):
        try:
            if code in unusable:
                raise RowError(CODES[code] or Reason.UNREADABLE_ROW)
            turns = _decoded(ids[at].as_py(), policy)
            reason = CODES[code]
            old = (reason.value if reason else None, int(part.n_supervised[at]))
            collected.keep(number, row_ids[at], policy.keep_turns(turns, None, old))
        except RowError as error:
            collected.reject(number, row_ids[at], error)


def _decoded(ids: list[int], policy: Policy) -> list[Any]:
    if policy.target is None:
        raise RowError(Reason.DOES_NOT_DECODE, "tokenized rows need a target to be read back; none was given")
    try:
        messages = policy.target.split_conversation(ids)
    except (ValueError, IndexError, OverflowError) as error:
        raise RowError(Reason.DOES_NOT_DECODE, str(error)) from error
    return [(m.role, m.content, m.reasoning_content, m.tool_calls, m.tool_call_id, m.name) for m in messages]
