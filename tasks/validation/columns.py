"""Column stores: Parquet row groups and Arrow record batches, read a unit at a time."""

from collections.abc import Iterator
from typing import Any

import orjson
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import DatasetError
from tasks.validation.canonical import ANSWER_COLUMNS
from tasks.validation.levels import list_batches
from tasks.validation.reasons import Reason, RowError
from tasks.validation.units import Source, Unit

CHAT_COLUMNS = ("messages", "conversations", "conversation", "turns", "prompt", "system", "tools", *ANSWER_COLUMNS)
ID_COLUMNS = ("id", "uuid", "conversation_id", "question_id", "prompt_id", "primary_id")
BATCH_ROWS = 2048
"""Rows decoded at a time inside a Parquet row group: a group of any size streams, and a batch stays in cache."""


def schema_of(source: Source) -> pa.Schema:
    """The columns of a file. Raises DatasetError when it cannot be read."""
    try:
        if source.format == "parquet":
            return pq.read_schema(source.path)
        with pa.memory_map(source.path) as file:
            return open_arrow(file).schema
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(source, error) from error


def open_arrow(file: pa.NativeFile) -> Any:
    """An Arrow file or an Arrow stream (what `save_to_disk` writes)."""
    magic = file.read(6)
    file.seek(0)
    return pa.ipc.open_file(file) if magic == b"ARROW1" else pa.ipc.open_stream(file)


def group_rows(source: Source) -> list[int]:
    """Rows of every row group or record batch, in order."""
    try:
        if source.format == "parquet":
            with pq.ParquetFile(source.path) as file:
                return [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        with pa.memory_map(source.path) as mapped:
            return [len(batch) for batch in arrow_batches(mapped)]
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(source, error) from error


def arrow_batches(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Record batches of an Arrow file or stream, without a copy where `file` is mapped."""
    reader = open_arrow(file)
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from reader


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
            for index, batch in enumerate(arrow_batches(mapped)):
                if index > unit.groups[-1]:
                    return
                if index >= unit.groups[0]:
                    yield batch.select(columns)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(source, error) from error


def token_batches(unit: Unit, lists: list[str], others: list[str]) -> Iterator[pa.RecordBatch]:
    """As `batches`, for columns `lists` of integers: fast where every row is a list of them, and the same elsewhere."""
    if unit.source.format == "parquet":
        try:
            yield from list_batches(unit.source.path, unit.groups, lists, others)
            return
        except (ValueError, LookupError, pa.ArrowException, OSError):
            pass  # Another layout, or damage, which Arrow's own reader words better.
    yield from batches(unit, [*lists, *others])


def columnar_rows(unit: Unit) -> Iterator[tuple[int, Any]]:
    """(row number, row as a dict) of a unit of chat rows. The JSON text is made in columns, by polars."""
    names = [name for name in schema_of(unit.source).names if name in (*CHAT_COLUMNS, *ID_COLUMNS)]
    if not names:
        found = ", ".join(schema_of(unit.source).names[:12])
        empty = RowError(Reason.NO_CONVERSATION, f"columns are {found}")
        yield from ((unit.first_row + i, empty) for i in range(unit.rows))
        return
    number, end = unit.first_row, unit.first_row + unit.rows
    for batch in batches(unit, names):
        for value in _values(batch):
            if number >= end:
                return
            yield number, value
            number += 1


def _values(batch: pa.RecordBatch) -> Iterator[Any]:
    try:
        batch.validate(full=True)
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
    except (pa.ArrowException, ValueError) as error:
        return RowError(Reason.UNREADABLE_ROW, str(error))


def _unreadable(source: Source, error: Exception) -> DatasetError:
    return DatasetError(
        f"cannot read {source.label} as {source.format}: {error}; the file is damaged or of another format"
    )
