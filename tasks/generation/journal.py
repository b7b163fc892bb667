"""Append-only journal of one chunk: length-prefixed records with checksums.

File: `RGNJ` magic, then records. Record: header (payload bytes u32, row u32, turn u16, kind u8, zero u8, xxh3-64 of
header and payload) and payload (JSON). The first record is the journal's own identity. A torn tail (a crash while
writing) is cut when the journal is opened; damage with valid records behind it is not a torn write and is an error.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import orjson
import xxhash

from tasks.errors import SpecError, StorageError

MAGIC = b"RGNJ0001"
_HEAD = struct.Struct("<IIHBB")
_SUM = struct.Struct("<Q")
PREFIX = _HEAD.size + _SUM.size
MAX_PAYLOAD = 1 << 30
NO_ROW = 0xFFFFFFFF


class Kind(IntEnum):
    """What a record says about its row."""

    HEADER = 0
    TURN = 1  # one accepted assistant turn; more follow
    LAST = 2  # the last accepted turn: the row is done
    ATTEMPT = 3  # one attempt that did not count as an answer
    FAILED = 4  # terminal failure of the row


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a record lies; `size` is its payload's bytes."""

    row: int
    turn: int
    kind: Kind
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Scan:
    """Valid records and where they end. `cut_bytes` is the torn tail behind them."""

    entries: list[Entry]
    end: int
    cut_bytes: int


def encode(row: int, turn: int, kind: Kind, payload: bytes) -> bytes:
    """One record as it lies on disk."""
    head = _HEAD.pack(len(payload), row, turn, kind, 0)
    return b"".join((head, _SUM.pack(xxhash.xxh3_64_intdigest(head + payload)), payload))


def scan(data: memoryview | bytes, path: Path) -> Scan:
    """Walk all records. Raises StorageError when a damaged record has valid ones behind it."""
    entries: list[Entry] = []
    at = len(MAGIC)
    while at < len(data):
        entry = _entry_at(data, at)
        if entry is None:
            _refuse_damage_inside(data, at, path, len(entries))
            break
        entries.append(entry)
        at = entry.offset + entry.size
    return Scan(entries, at, len(data) - at)


def _entry_at(data: memoryview | bytes, at: int) -> Entry | None:
    if at + PREFIX > len(data):
        return None
    size, row, turn, kind, _ = _HEAD.unpack_from(data, at)
    body = at + PREFIX
    if size > MAX_PAYLOAD or body + size > len(data) or kind > Kind.FAILED:
        return None
    (digest,) = _SUM.unpack_from(data, at + _HEAD.size)
    hasher = xxhash.xxh3_64(data[at : at + _HEAD.size])
    hasher.update(data[body : body + size])
    return Entry(row, turn, Kind(kind), body, size) if hasher.intdigest() == digest else None


def _refuse_damage_inside(data: memoryview | bytes, at: int, path: Path, record: int) -> None:
    """A crash tears only the end. If the record after a damaged one is whole, something else happened to the file."""
    if at + PREFIX > len(data):
        return
    size = _HEAD.unpack_from(data, at)[0]
    following = at + PREFIX + size
    if 0 < size <= MAX_PAYLOAD and following < len(data) and _entry_at(data, following) is not None:
        raise StorageError(
            f"{path}: record {record} at byte {at} fails its checksum but the records after it are valid, so this is "
            "not a torn write; check the disk, then delete this journal to redo the chunk"
        )


class Journal:
    """An open journal. `append` reaches the page cache at once; `sync` makes it durable (call it each second)."""

    def __init__(self, path: Path, file_descriptor: int, found: Scan, end: int) -> None:
        self.path, self.entries, self.cut_bytes = path, found.entries, found.cut_bytes
        self._file, self._end = file_descriptor, end
        self._dirty = False

    @classmethod
    def open(cls, path: Path, identity: dict[str, Any]) -> "Journal":
        """Open or create; repairs a torn tail; refuses a journal of another identity (SpecError naming the fields)."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(
                f"cannot open {path}: {error.strerror}; check the run's folder and its rights"
            ) from error
        data = path.read_bytes()
        fresh = len(data) < len(MAGIC)
        if fresh or not data.startswith(MAGIC):
            if not fresh:
                os.close(handle)
                raise StorageError(f"{path} is not a journal (it begins {data[:8]!r}); move it away")
            os.ftruncate(handle, 0)
            os.pwrite(handle, MAGIC, 0)
            data = MAGIC
        found = scan(data, path)
        if found.cut_bytes:
            os.ftruncate(handle, found.end)
        journal = cls(path, handle, found, found.end)
        if found.entries:
            check_identity(orjson.loads(journal.read(found.entries[0])), identity, path)
        else:
            journal.append(NO_ROW, 0, Kind.HEADER, identity)
        return journal

    def append(self, row: int, turn: int, kind: Kind, value: Any) -> Entry:
        """Write one record. Raises StorageError when the disk refuses; the file then still ends in a whole record."""
        payload = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        record = encode(row, turn, kind, payload)
        try:
            _write_all(self._file, record, self._end)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise StorageError(f"cannot write {self.path}: {error.strerror}; free space, then resume") from error
        entry = Entry(row, turn, kind, self._end + PREFIX, len(payload))
        self._end += len(record)
        self._dirty = True
        self.entries.append(entry)
        return entry

    def read(self, entry: Entry) -> bytes:
        """The payload of one record."""
        return os.pread(self._file, entry.size, entry.offset)

    def load(self, entry: Entry) -> dict[str, Any]:
        """The payload as an object."""
        value: dict[str, Any] = orjson.loads(self.read(entry))
        return value

    def sync(self) -> None:
        """fsync what was appended since the last time (callable from another thread)."""
        if self._dirty:
            self._dirty = False
            os.fdatasync(self._file)

    def close(self) -> None:
        """Make durable and close."""
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file = -1


def _write_all(handle: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def check_identity(recorded: dict[str, Any], identity: dict[str, Any], path: Path) -> None:
    """Refuse to mix answers of two specs, naming what differs."""
    different = [name for name in sorted({*recorded, *identity}) if recorded.get(name) != identity.get(name)]
    if different:
        shown = "; ".join(f"{n}: {recorded.get(n)!r} there, {identity.get(n)!r} now" for n in different)
        raise SpecError(
            f"{path} was begun under another spec ({shown}). Finish that run with its own spec, or start a new one."
        )


def replay(entries: list[Entry]) -> Iterator[Entry]:
    """Entries without the header, in the order they were written."""
    return (entry for entry in entries if entry.kind is not Kind.HEADER)
