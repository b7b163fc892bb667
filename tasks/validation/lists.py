"""Parquet columns of integer lists, read faster: row bounds from the repetition levels, values as a flat column.

Arrow turns the two levels of every value into lists, at more than the cost of the values. Here the levels are taken off
the pages: repetition levels are a few runs a row, so they are read as runs, and definition levels only have to say, in
one run, that nothing is null or empty. What is left of the pages is a column without levels; Arrow decodes that.
Whatever looks different (nulls, empty rows, other encodings of levels, very large row groups) is left to Arrow as it
is. Formats: https://parquet.apache.org/docs/file-format/data-pages/ and parquet.thrift.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.validation.levels import OtherLayoutError, check_definition, row_starts
from tasks.validation.thrift import BINARY, I32, I64, LIST, STRUCT, read_struct, write_struct

MOST_VALUES = 1 << 24
"""Values of a column that are held at once: 64 MiB of ids. Larger row groups are streamed by Arrow."""

MOST_BYTES = 1 << 27
BATCH_VALUES = 1 << 23
"""Values handed on at a time: many, so that threads seldom wait for each other, and few enough to bound memory."""

DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 0, 2, 3
RLE, PLAIN = 3, 0
PHYSICAL = {"BOOLEAN": 0, "INT32": 1, "INT64": 2}
CONVERTED = {"UINT_8": 11, "UINT_16": 12, "UINT_32": 13, "UINT_64": 14} | {
    "INT_8": 15, "INT_16": 16, "INT_32": 17, "INT_64": 18,
}  # fmt: skip
MAGIC = b"PAR1"
SLACK = 1024
"""Bytes beside the pages that a column of a row group may need in the flat file."""


class _Scratch(threading.local):
    """One thread's buffer for pages without levels, used again for every unit: fresh memory costs a page fault."""

    def __init__(self) -> None:
        self.buffer = np.zeros(0, np.uint8)

    def room(self, size: int) -> NDArray[np.uint8]:
        """At least `size` writable bytes, with whatever they held before."""
        if len(self.buffer) < size:
            self.buffer = np.empty(size, np.uint8)
        return self.buffer


_scratch = _Scratch()


@dataclass(slots=True)
class _Pages:
    """A flat file in the making: what it holds ends at `end`."""

    out: NDArray[np.uint8]
    end: int = 0

    def add(self, *parts: bytes | memoryview) -> None:
        """Append bytes. (numpy copies without the interpreter's lock, which a memoryview keeps.)"""
        for part in parts:
            after = self.end + len(part)
            if after > len(self.out):
                raise OtherLayoutError("the pages are larger than the footer says")
            self.out[self.end : after] = np.frombuffer(part, np.uint8)
            self.end = after


@dataclass(slots=True)
class _Chunk:
    """One column of one row group without its levels: where its pages lie in the flat file, and where rows start."""

    values: int
    begin: int
    first_data: int
    end: int = 0
    seen: int = 0
    starts: list[NDArray[np.int64]] = field(default_factory=list)


def list_batches(path: str, groups: Sequence[int], lists: Sequence[str], others: Sequence[str]) -> Iterator[Any]:
    """Record batches of some row groups: columns `lists` as read_lists does, then `others`.

    Raises what read_lists raises, before the first batch.
    """
    with pq.ParquetFile(path, memory_map=False, pre_buffer=False) as file, pa.memory_map(path) as raw:
        columns = [read_lists(file, raw, groups, name) for name in lists]
        if others:
            rest = file.read_row_groups(list(groups), columns=list(others), use_threads=False).combine_chunks()
            columns += [rest.column(name).chunk(0) for name in others]
    whole = pa.RecordBatch.from_arrays(columns, names=[*lists, *others])
    parts = 1 + max(len(column.values) for column in columns[: len(lists)]) // BATCH_VALUES
    rows = -(-len(whole) // parts) or 1
    yield from (whole.slice(at, rows) for at in range(0, len(whole), rows))


def read_lists(file: pq.ParquetFile, raw: pa.NativeFile, groups: Sequence[int], name: str) -> pa.LargeListArray:
    """Column `name` of some row groups; `raw` is the same file's bytes.

    Raises OtherLayoutError, IndexError or pa.ArrowException where the column is not plainly a list of integers in every
    row, or is damaged.
    """
    index = _leaf(file, name)
    leaf = file.schema.column(index)
    metas = [file.metadata.row_group(group).column(index) for group in groups]
    held = sum(meta.num_values for meta in metas), sum(meta.total_uncompressed_size for meta in metas)
    if held[0] > MOST_VALUES or held[1] > MOST_BYTES:
        raise OtherLayoutError("the row groups are too large to be held")
    pages = _Pages(_scratch.room(held[1] + held[1] // 8 + SLACK * (1 + len(metas))))
    pages.add(MAGIC)
    chunks = [_chunk(raw, meta, leaf.max_definition_level, pages) for meta in metas]
    offsets, before = [], 0
    for chunk, group in zip(chunks, groups, strict=True):
        starts = np.concatenate(chunk.starts) if chunk.starts else np.zeros(0, np.int64)
        rows = file.metadata.row_group(group).num_rows
        if chunk.seen != chunk.values or len(starts) != rows or (rows and starts[0] != 0):
            raise OtherLayoutError("the levels do not add up to the rows")
        offsets.append(starts + before)
        before += chunk.values
    bounds = np.concatenate([*offsets, np.array([before], np.int64)])
    _close(pages, leaf, chunks)
    with pq.ParquetFile(pa.py_buffer(pages.out[: pages.end]), pre_buffer=False) as flat_file:
        flat = flat_file.read(use_threads=False)
    values = flat.column(0).combine_chunks() if flat.column(0).num_chunks != 1 else flat.column(0).chunk(0)
    if len(values) != before:
        raise OtherLayoutError("the pages do not hold as many values as they say")
    return pa.LargeListArray.from_arrays(pa.array(bounds), values)


def _leaf(file: pq.ParquetFile, name: str) -> int:
    schema = file.schema
    found = [i for i in range(len(schema)) if schema.column(i).path.split(".")[0] == name]
    if len(found) != 1 or schema.column(found[0]).max_repetition_level != 1:
        raise OtherLayoutError("not a list")
    leaf = schema.column(found[0])
    if leaf.physical_type not in PHYSICAL or leaf.converted_type not in (*CONVERTED, "NONE"):
        raise OtherLayoutError("not integers")
    return found[0]


def _chunk(raw: pa.NativeFile, meta: Any, max_definition: int, pages: _Pages) -> _Chunk:
    start = meta.dictionary_page_offset or meta.data_page_offset
    raw.seek(min(start, meta.data_page_offset))
    data = memoryview(raw.read_buffer(meta.total_compressed_size)).cast("B")
    kind = {"LZ4": "lz4_raw"}.get(meta.compression, meta.compression.lower())
    codec = None if kind == "uncompressed" else pa.Codec(kind)
    chunk, at = _Chunk(meta.num_values, pages.end, pages.end), 0
    while chunk.seen < meta.num_values:
        head, at = read_struct(data, at)
        body = data[at : at + head[3]]
        at += head[3]
        if head[1] == DICTIONARY_PAGE:
            body = _inflated(codec, body, head[2])
            described = (STRUCT, write_struct({1: (I32, head[7][1]), 2: (I32, head[7][2])}))
            pages.add(_page_header(DICTIONARY_PAGE, len(body), 7, described), body)
            chunk.first_data = pages.end
        elif head[1] in (DATA_PAGE, DATA_PAGE_V2):
            pages.add(*_data_page(chunk, head, body, codec, max_definition))
    chunk.end = pages.end
    return chunk


def _data_page(
    chunk: _Chunk, head: dict[int, Any], body: memoryview, codec: Any, max_definition: int
) -> tuple[bytes, memoryview]:
    """(header, body) of a data page without its levels; the levels are noted in `chunk`."""
    if head[1] == DATA_PAGE:
        about = head[5]
        if about[3] != RLE or about[4] != RLE:
            raise OtherLayoutError("levels in the old bit-packed form")
        body = _inflated(codec, body, head[2])
        repetition, body = _prefixed(body)
        definition, body = _prefixed(body)
        encoding = about[2]
    else:
        about = head[8]
        cut, end = about[6], about[6] + about[5]
        repetition, definition, body = body[:cut], body[cut:end], body[end:]
        encoding = about[4]
        if about.get(7, True):
            body = _inflated(codec, body, head[2] - end)
    count = about[1]
    if count:
        check_definition(definition, count, max_definition)
        chunk.starts.append(row_starts(np.frombuffer(repetition, np.uint8), count) + chunk.seen)
    fields = {1: (I32, count), 2: (I32, encoding), 3: (I32, RLE), 4: (I32, RLE)}
    chunk.seen += count
    return _page_header(DATA_PAGE, len(body), 5, (STRUCT, write_struct(fields))), body


def _inflated(codec: Any, body: memoryview, size: int) -> memoryview:
    return body if codec is None or not size else memoryview(codec.decompress(body, size)).cast("B")


def _prefixed(body: memoryview) -> tuple[memoryview, memoryview]:
    end = 4 + int.from_bytes(body[:4], "little")
    return body[4:end], body[end:]


def _page_header(kind: int, size: int, number: int, described: tuple[int, bytes]) -> bytes:
    return write_struct({1: (I32, kind), 2: (I32, size), 3: (I32, size), number: described})


def _close(pages: _Pages, leaf: Any, chunks: Sequence[_Chunk]) -> None:
    """Write the footer of a file with one required column, uncompressed."""
    physical, groups = PHYSICAL[leaf.physical_type], []
    for chunk in chunks:
        size = chunk.end - chunk.begin
        column: dict[int, tuple[int, Any]] = {
            1: (I32, physical),
            2: (LIST, (I32, [PLAIN, RLE])),
            3: (LIST, (BINARY, [b"v"])),
            4: (I32, 0),
            5: (I64, chunk.values),
            6: (I64, size),
            7: (I64, size),
            9: (I64, chunk.first_data),
        }
        if chunk.first_data > chunk.begin:
            column[11] = (I64, chunk.begin)
        described = write_struct({2: (I64, chunk.begin), 3: (STRUCT, write_struct(column))})
        groups.append(write_struct({1: (LIST, (STRUCT, [described])), 2: (I64, size), 3: (I64, chunk.values)}))
    top = write_struct({4: (BINARY, b"root"), 5: (I32, 1)})
    fields: dict[int, tuple[int, Any]] = {1: (I32, physical), 3: (I32, 0), 4: (BINARY, b"v")}
    if leaf.converted_type != "NONE":
        fields[6] = (I32, CONVERTED[leaf.converted_type])
    total = sum(chunk.values for chunk in chunks)
    schema = (LIST, (STRUCT, [top, write_struct(fields)]))
    footer = write_struct({1: (I32, 1), 2: schema, 3: (I64, total), 4: (LIST, (STRUCT, groups))})
    pages.add(footer, len(footer).to_bytes(4, "little"), MAGIC)
