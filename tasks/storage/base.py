"""What every store can do, and the errors it raises. Keys are relative to the store's root, with `/`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from tasks.errors import StorageError
from tasks.records import FileEntry

SHA256 = "sha256"
"""Name of our own digest in an object's metadata."""

READS = 3
"""Times a mismatching object is read again: bytes damaged on the way to us are not damaged in the store."""


class MissingError(StorageError):
    """The key is not there."""


class ConflictError(StorageError):
    """Somebody else wrote the key since it was read: nothing was written."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a store says about one key, without its content. `version` is opaque; it is never taken for content."""

    key: str
    bytes: int
    version: str
    sha256: str | None = None
    crc64nvme: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)


class Store(Protocol):
    """A data set's public home: a folder or a bucket prefix. Every method raises StorageError on a refusal."""

    @property
    def url(self) -> str:
        """Where it is: a path or `s3://bucket/prefix`."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that left for the store so far, repeats included."""

    def put_file(self, key: str, path: Path, *, rows: int | None = None, kind: str = "") -> FileEntry:
        """Store a finished local file and prove that the stored bytes are its bytes.

        A file that is there already is not sent again. Raises VerificationError when the bytes stay wrong.
        """

    def put_bytes(self, key: str, data: bytes, *, if_match: str | None = None, if_none_match: bool = False) -> str:
        """Store a small object whole or not at all; returns its version. Raises ConflictError on a lost race."""

    def get_bytes(self, key: str) -> bytes:
        """A small object. Raises MissingError."""

    def get_bytes_with_version(self, key: str) -> tuple[bytes, str]:
        """A small object and the version to hand to `if_match`. Raises MissingError."""

    def exists(self, key: str) -> bool:
        """Whether the key is there."""

    def head(self, key: str) -> Head:
        """Size, version and digests as the store has them. Raises MissingError."""

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """(key, bytes) of every key that starts with `prefix`, in key order."""

    def open(self, key: str) -> BinaryIO:
        """A seekable reader that fetches only the ranges that are read."""

    def download(self, key: str, path: Path) -> None:
        """Copy to a local file, atomically and verified against our digest where the store has it."""

    def delete(self, key: str) -> None:
        """Remove the key; a key that is not there is fine."""

    def verify(self, entry: FileEntry) -> None:
        """Read every byte and compare size and SHA-256. Raises VerificationError naming the difference."""

    def abandon_uploads(self, prefix: str = "") -> int:
        """Drop unfinished uploads below `prefix`, which cost money unseen; returns how many."""
