"""Sources cut into units of work, in order, up to the limit of rows."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tasks.errors import DatasetError
from tasks.validation.columns import group_rows
from tasks.validation.compressed import READ_ERRORS, open_text
from tasks.validation.document import document_blocks
from tasks.validation.lines import BLOCK_BYTES, Block, cut_blocks
from tasks.validation.settings import SourceSettings
from tasks.validation.units import Source, Unit

UNIT_ROWS = 8192
"""Rows of a unit of a column store: small row groups and record batches are read together."""


def units(sources: list[Source], settings: SourceSettings) -> Iterator[Unit]:
    """Units in source order. Reads JSONL ahead only to find where lines end."""
    numbers, left = count(), settings.limit
    for source in sources:
        parts = _lines(source, settings) if source.format in ("jsonl", "json") else _groups(source)
        for first_row, rows, weight, block, groups in parts:
            taken = rows if left is None else min(rows, left)
            if taken:
                columnar = block is None
                yield Unit(next(numbers), source, first_row, taken, weight, block, groups, columnar)
            if left is not None:
                left -= taken
                if left <= 0:
                    return


Part = tuple[int, int, int, Block | None, tuple[int, ...]]


def _lines(source: Source, settings: SourceSettings) -> Iterator[Part]:
    if source.format == "json":
        yield from ((b.first_row, b.lines, b.length, b, ()) for b in document_blocks(source))
        return
    max_line, packed = settings.max_line_bytes, bool(source.compression)
    try:
        with open_text(source.path, source.compression) as file:
            for block in cut_blocks(file, keep_data=packed, max_line=max_line, block_bytes=BLOCK_BYTES):
                yield block.first_row, block.lines, block.length, block, ()
    except (*READ_ERRORS, ValueError) as error:
        raise DatasetError(f"cannot read {source.label} to its end: {error}; the file is damaged or cut") from error


def _groups(source: Source) -> Iterator[Part]:
    first_row = 0
    held: list[int] = []
    rows = 0
    sizes = group_rows(source)
    row_bytes = Path(source.path).stat().st_size / max(sum(sizes), 1)
    for index, size in enumerate(sizes):
        held.append(index)
        rows += size
        if rows >= UNIT_ROWS or index == len(sizes) - 1:
            yield first_row, rows, round(rows * row_bytes), None, tuple(held)
            first_row, rows, held = first_row + rows, 0, []
