"""Scan of tokenized column stores for training: threads that decode and judge, with bounded memory.

Decoding (pyarrow), the passes over flat arrays (numpy) and hashing (polars) all release the GIL, so threads are enough
and nothing is copied between processes.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from tasks.errors import DatasetError
from tasks.validation.columns import ID_COLUMNS, batches, check_rows, schema_of, token_batches
from tasks.validation.sources import mask_column
from tasks.validation.tokenized import TokenPart, TokenRules, scan
from tasks.validation.units import Unit


def scan_units(
    found: Iterable[Unit], rules: TokenRules, workers: int | None = None, done: Callable[[Unit], None] | None = None
) -> Iterator[TokenPart]:
    """Judge tokenized units; parts come back in order. At most two units a thread are in memory."""
    threads = workers or min(len(os.sched_getaffinity(0)), 8)
    waiting: deque[tuple[Unit, Future[list[TokenPart]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="scan") as pool:
        for unit in found:
            waiting.append((unit, pool.submit(_scanned, unit, rules)))
            if len(waiting) > threads:
                yield from _taken(waiting, done)
        while waiting:
            yield from _taken(waiting, done)


def _taken(
    waiting: deque[tuple[Unit, Future[list[TokenPart]]]], done: Callable[[Unit], None] | None
) -> Iterator[TokenPart]:
    unit, future = waiting.popleft()
    yield from future.result()
    if done:
        done(unit)


def _scanned(unit: Unit, rules: TokenRules) -> list[TokenPart]:
    return [part for part, _ in scan_unit(unit, rules)]


def scan_unit(unit: Unit, rules: TokenRules) -> Iterator[tuple[TokenPart, pa.Array]]:
    """(judgement, input_ids) of every batch of one unit."""
    schema = schema_of(unit.source)
    mask = mask_column(unit.source, schema)
    id_column = next((name for name in ID_COLUMNS if name in schema.names), None)
    row, end = unit.first_row, unit.first_row + unit.rows
    for batch in token_batches(unit, ["input_ids", mask], [id_column] if id_column else []):
        if row >= end:
            break
        batch = batch.slice(0, end - row)
        _check_lists(batch, unit)
        part = scan(
            batch.column("input_ids"),
            batch.column(mask),
            rules,
            labels=mask == "labels",
            first_row=row,
            source=unit.source.label,
        )
        if id_column:
            part.ids = _ids(batch.column(id_column))
        yield part, batch.column("input_ids")
        row += len(batch)
    check_rows(unit, row)


def _check_lists(batch: pa.RecordBatch, unit: Unit) -> None:
    """Raises DatasetError where the offsets of a list do not fit its values, or where ids are booleans."""
    if pa.types.is_boolean(batch.column(0).type.value_type):
        raise DatasetError(f"{unit.source.label}: input_ids holds booleans, expected integers")
    try:
        batch.validate(full=False)
        for column in batch.columns[:2]:
            column.validate(full=True)
    except pa.ArrowException as error:
        raise DatasetError(f"{unit.source.label} is damaged near row {unit.first_row}: {error}") from error


def _ids(column: pa.Array) -> pa.Array | None:
    """Ids as text; None where their type has no plain text form: they are a convenience of whoever made the file."""
    try:
        return column.cast(pa.string())
    except pa.ArrowException:
        return None


def example_ids(unit: Unit, row: int) -> list[int]:
    """The token ids of one row, for an example in a report."""
    at = unit.first_row
    for batch in batches(unit, ["input_ids"]):
        if row < at + len(batch):
            return list(batch.column("input_ids")[row - at].as_py() or [])
        at += len(batch)
    return []
