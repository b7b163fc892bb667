"""Whole rows laid end to end into sequences of one length. A row is never split, so its mask stays what it was."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from tasks.tokenization.schema import IDS, MASK, PACKED


class Packer:
    """First fit over a bounded number of open sequences; order in is nearly order out."""

    OPEN = 64
    """Sequences kept open; more fills them better and keeps more rows in memory."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._open: list[tuple[int, list[tuple[str, pa.Array, pa.Array]]]] = []

    def add(self, tokens: pa.RecordBatch) -> pa.RecordBatch:
        """Take the rows of a token batch; returns the sequences that were closed by them."""
        closed = []
        ids, masks = tokens.column("input_ids"), tokens.column("loss_mask")
        for row, prompt_id in enumerate(tokens.column("prompt_id").to_pylist()):
            closed += list(self._place((prompt_id, ids[row].values, masks[row].values)))
        return self._batch(closed)

    def finish(self) -> pa.RecordBatch:
        """The sequences that are still open."""
        rest, self._open = [rows for _, rows in self._open], []
        return self._batch(rest)

    def _place(self, row: tuple[str, pa.Array, pa.Array]) -> Iterator[list[tuple[str, pa.Array, pa.Array]]]:
        size = len(row[1])
        for index, (used, rows) in enumerate(self._open):
            if used + size <= self._length:
                rows.append(row)
                self._open[index] = (used + size, rows)
                return
        if size >= self._length:
            yield [row]
            return
        if len(self._open) >= self.OPEN:
            fullest = max(range(len(self._open)), key=lambda index: self._open[index][0])
            yield self._open.pop(fullest)[1]
        self._open.append((size, [row]))

    def _batch(self, sequences: list[list[tuple[str, pa.Array, pa.Array]]]) -> pa.RecordBatch:
        lengths = [[len(ids) for _, ids, _ in rows] for rows in sequences]
        offsets = pa.array(np.concatenate(([0], np.cumsum([sum(part) for part in lengths], dtype=np.int64))))

        def joined(column: int, kind: pa.DataType) -> pa.Array:
            parts = [row[column] for rows in sequences for row in rows]
            values = pa.concat_arrays(parts) if parts else pa.array([], kind.value_type)
            return pa.LargeListArray.from_arrays(offsets, values, type=kind)

        names = pa.array([[prompt_id for prompt_id, _, _ in rows] for rows in sequences], PACKED.field(3).type)
        columns = [joined(1, IDS), joined(2, MASK), pa.array(lengths, PACKED.field(2).type), names]
        return pa.RecordBatch.from_arrays(columns, schema=PACKED)
