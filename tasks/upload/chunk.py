"""Publishing the files of one finished chunk, and proving from the store that they are there whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import VerificationError
from tasks.records import FileEntry, PublishedChunk
from tasks.runs import write_json
from tasks.storage import Store
from tasks.storage.base import READS
from tasks.upload.layout import CHUNK_FILES, PUBLISHED, chunk_prefix


def upload_chunk(store: Store, run_id: str, directory: Path, record: Any) -> PublishedChunk:
    """Send every file of `directory` (a chunk folder) and re-read sizes and row counts from the store.

    `record` is anything with `.index`. Safe to repeat: what is there is not sent again, and an interrupted file goes on
    where it stopped. Writes published.json beside the files. Raises StorageError or VerificationError.
    """
    before, prefix = store.bytes_sent, chunk_prefix(run_id, record.index)
    files = tuple(
        put_proven(store, prefix + name, directory / name, kind)
        for name, kind in CHUNK_FILES.items()
        if (directory / name).exists()
    )
    if not files:
        raise VerificationError(f"{directory} holds none of {', '.join(CHUNK_FILES)}: generate the chunk first")
    write_json(directory / PUBLISHED, {"run_id": run_id, "index": record.index, "files": [asdict(f) for f in files]})
    return PublishedChunk(record.index, files, store.bytes_sent - before)


def put_proven(store: Store, key: str, path: Path, kind: str) -> FileEntry:
    """Send one file, then ask the store for its size and, for Parquet, its footer. Raises VerificationError."""
    rows = parquet_rows(path) if path.suffix == ".parquet" else None
    entry = store.put_file(key, path, rows=rows, kind=kind)
    size = store.head(key).bytes
    if size != entry.bytes:
        raise VerificationError(f"{store.url}/{key}: the store has {size} bytes, {path} has {entry.bytes}")
    if rows is not None:
        found = stored_rows(store, key)
        if found != rows:
            raise VerificationError(f"{store.url}/{key}: the store has {found} rows, {path} has {rows}")
    return entry


def parquet_rows(path: Path) -> int:
    """Rows by the footer of a local file. Raises VerificationError when it is not whole."""
    with _whole(path):
        return int(pq.read_metadata(path).num_rows)


def stored_rows(store: Store, key: str) -> int:
    """Rows by the footer in the store, through ranged reads; read again when it arrives damaged."""
    for _ in range(READS - 1):
        try:
            return _footer_rows(store, key)
        except (pa.ArrowException, OSError, ValueError):
            continue
    with _whole(f"{store.url}/{key}"):
        return _footer_rows(store, key)


def _footer_rows(store: Store, key: str) -> int:
    with store.open(key) as file:
        return int(pq.read_metadata(file).num_rows)


@contextmanager
def _whole(name: object) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise VerificationError(f"{name} is not a whole Parquet file: {error}; write it again") from error
