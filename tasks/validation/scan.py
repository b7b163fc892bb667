"""Scan of tokenized column stores for training: threads that decode and judge, with bounded memory.

Decoding (pyarrow), the passes over flat arrays (numpy) and hashing (polars) all release the GIL, so threads are enough
and nothing is copied between processes.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from tasks.validation.columns import ID_COLUMNS, batches, schema_of, token_batches
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
        part = scan(
            batch.column("input_ids"),
            batch.column(mask),
            rules,
            labels=mask == "labels",
            first_row=row,
            source=unit.source.label,
        )
        if id_column:
            part.ids = batch.column(id_column).cast(pa.string())
        yield part, batch.column("input_ids")
        row += len(batch)


def example_ids(unit: Unit, row: int) -> list[int]:
    """The token ids of one row, for an example in a report."""
    at = unit.first_row
    for batch in batches(unit, ["input_ids"]):
        if row < at + len(batch):
            return list(batch.column("input_ids")[row - at].as_py() or [])
        at += len(batch)
    return []
