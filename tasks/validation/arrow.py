"""Arrow files and Arrow streams (what `save_to_disk` writes): record batches by number, in place in the mapped file."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa


def open_arrow(file: pa.NativeFile) -> Any:
    """An Arrow file or an Arrow stream (what `save_to_disk` writes)."""
    magic = file.read(6)
    file.seek(0)
    return pa.ipc.open_file(file) if magic == b"ARROW1" else pa.ipc.open_stream(file)


def batch_rows(path: str) -> list[int]:
    """Rows of every record batch, in order."""
    with pa.memory_map(path) as mapped:
        reader = open_arrow(mapped)
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            return [len(reader.get_batch(i)) for i in range(reader.num_record_batches)]
    return [rows for _, rows in _stream_index(path)]


def _stream_index(path: str) -> list[tuple[int, int]]:
    """(place in the file, rows) of every record batch of an Arrow stream."""
    facts = Path(path).stat()
    return _indexed(path, facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=16)
def _indexed(path: str, _size: int, _mtime_ns: int) -> list[tuple[int, int]]:
    """A stream has no index of its own; without one, every unit would read all that lies before it."""
    found = []
    with pa.memory_map(path) as mapped:
        reader = open_arrow(mapped)
        while True:
            place = mapped.tell()
            try:
                found.append((place, len(reader.read_next_batch())))
            except StopIteration:
                return found


def _has_dictionary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))


def arrow_batches(mapped: pa.NativeFile, path: str, groups: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """The record batches numbered `groups` (one after the other), in place in the mapped file `path`."""
    reader = open_arrow(mapped)
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        yield from map(reader.get_batch, groups)
    elif any(_has_dictionary(field.type) for field in reader.schema):
        yield from islice(reader, groups[0], groups[-1] + 1)  # its values come in messages of their own
    else:
        index = _stream_index(path)
        for group in groups:
            mapped.seek(index[group][0])
            yield pa.ipc.read_record_batch(pa.ipc.read_message(mapped), reader.schema)
