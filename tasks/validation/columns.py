"""Column stores: Parquet row groups and Arrow record batches, read a unit at a time."""

from collections.abc import Iterator
from typing import Any

import orjson
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import DatasetError
from tasks.validation.arrow import arrow_batches, batch_rows, open_arrow
from tasks.validation.canonical import ANSWER_COLUMNS
from tasks.validation.lists import list_batches
from tasks.validation.reasons import Reason, RowError
from tasks.validation.units import Source, Unit

CHAT_COLUMNS = ("messages", "conversations", "conversation", "turns", "prompt", "system", "tools", *ANSWER_COLUMNS)
ID_COLUMNS = ("id", "uuid", "conversation_id", "question_id", "prompt_id", "primary_id")
JOINED_BYTES = 1 << 23
"""Of batches that are judged together: copying them costs less than judging each alone."""

BATCH_ROWS = 2048
"""Rows decoded at a time inside a Parquet row group: a group of any size streams, and a batch stays in cache."""


def schema_of(source: Source) -> pa.Schema:
    """The columns of a file. Raises DatasetError when it cannot be read."""
    try:
        if source.format == "parquet":
            return pq.read_schema(source.path)
        with pa.memory_map(source.path) as file:
            return open_arrow(file).schema
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(source, error) from error


def group_rows(source: Source) -> list[int]:
    """Rows of every row group or record batch, in order."""
    try:
        if source.format == "parquet":
            with pq.ParquetFile(source.path) as file:
                return [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        return batch_rows(source.path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(source, error) from error


def batches(unit: Unit, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The unit's rows, only `columns`. Raises DatasetError when the file is damaged."""
    source = unit.source
    try:
        if source.format == "parquet":
            with pq.ParquetFile(source.path, memory_map=False, pre_buffer=False) as file:
                groups, rows = list(unit.groups), BATCH_ROWS
                yield from file.iter_batches(rows, row_groups=groups, columns=columns, use_threads=False)
            return
        with pa.memory_map(source.path) as mapped:
            yield from (batch.select(columns) for batch in arrow_batches(mapped, source.path, unit.groups))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(source, error) from error


def token_batches(unit: Unit, lists: list[str], others: list[str]) -> Iterator[pa.RecordBatch]:
    """As `batches`, for columns `lists` of integers: fast where every row is a list of them, and the same elsewhere."""
    if unit.source.format == "parquet":
        try:
            yield from list_batches(unit.source.path, unit.groups, lists, others)
            return
        except (ValueError, LookupError, TypeError, pa.ArrowException, OSError):
            pass  # Another layout, or damage, which Arrow's own reader words better.
    yield from _joined(batches(unit, [*lists, *others]))


def _joined(found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small batches together: a judgement in columns costs for ten rows nearly what it costs for a thousand."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in found:
        held.append(batch)
        size += batch.nbytes
        if size >= JOINED_BYTES:
            yield pa.concat_batches(held)
            held, size = [], 0
    if held:
        yield pa.concat_batches(held)


def columnar_rows(unit: Unit) -> Iterator[tuple[int, Any]]:
    """(row number, row as a dict) of a unit of chat rows. The JSON text is made in columns, by polars."""
    names = [name for name in schema_of(unit.source).names if name in (*CHAT_COLUMNS, *ID_COLUMNS)]
    if not names:
        found = ", ".join(schema_of(unit.source).names[:12])
        empty = RowError(Reason.NO_CONVERSATION, f"columns are {found}")
        yield from ((unit.first_row + i, empty) for i in range(unit.rows))
        return
    number, end = unit.first_row, unit.first_row + unit.rows
    try:
        for batch in batches(unit, names):
            for value in _values(batch):
                if number >= end:
                    return
                yield number, value
                number += 1
    except DamagedError as error:
        raise _unreadable(unit.source, error) from error
    check_rows(unit, number)


def check_rows(unit: Unit, read_to: int) -> None:
    """Raises DatasetError where a file's index promises rows that reading it did not bring."""
    missing = unit.first_row + unit.rows - read_to
    if missing > 0:
        raise DatasetError(
            f"{unit.source.label}: rows {unit.first_row} to {unit.first_row + unit.rows - 1} are {unit.rows} by the "
            f"file's own index, but reading ended {missing} short; the file is damaged, or written in a way that "
            "pyarrow misreads: write it again with other settings, or with polars"
        )


def _values(batch: pa.RecordBatch) -> Iterator[Any]:
    try:
        _whole(batch)
        frame = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([batch])))
        texts = frame.select(pl.struct(pl.all()).struct.json_encode()).to_series()
    except (pa.ArrowException, pl.exceptions.PolarsError, pl.exceptions.PanicException):
        # Columns that polars has no form for, or text that is not UTF-8: a row at a time, so that only bad rows fail.
        yield from (_value(batch, at) for at in range(len(batch)))
        return
    yield from map(orjson.loads, texts)


def _value(batch: pa.RecordBatch, at: int) -> Any:
    try:
        return {name: batch.column(name)[at].as_py() for name in batch.schema.names}
    except UnicodeDecodeError as error:
        return RowError(Reason.INVALID_UTF8, str(error))
    except (pa.ArrowException, ValueError, OverflowError) as error:
        return RowError(Reason.UNREADABLE_ROW, str(error))


class DamagedError(ValueError):
    """A batch whose offsets or buffers do not fit together: reading a value of it may end the process."""


def _whole(batch: pa.RecordBatch) -> None:
    """Raises pa.ArrowInvalid where only some text is not UTF-8, DamagedError where nothing may be read."""
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        if "UTF8" in str(error):
            raise
        raise DamagedError(str(error)) from error


def _unreadable(source: Source, error: Exception) -> DatasetError:
    return DatasetError(
        f"cannot read {source.label} as {source.format}: {error}; the file is damaged or of another format"
    )
