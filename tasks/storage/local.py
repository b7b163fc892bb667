"""A folder as a store: atomic renames, a lock for conditional writes, and the same proofs as a bucket."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tasks.errors import StorageError, VerificationError
from tasks.records import FileEntry
from tasks.runs import sync_directory, write_atomic
from tasks.storage.base import ConflictError, Head, MissingError
from tasks.storage.digests import digest_file

LOCK = ".lock"


class LocalStore:
    """Keys are paths below `root`. A file that already lies at its key (store = working folder) is not copied."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self._sent = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The folder."""
        return str(self.root)

    @property
    def bytes_sent(self) -> int:
        """Bytes copied so far."""
        return self._sent

    def path(self, key: str) -> Path:
        """Where `key` lies. Raises StorageError for a key that would leave the folder."""
        path = (self.root / key).resolve()
        if not path.is_relative_to(self.root.resolve()):
            raise StorageError(f"key {key!r} leaves {self.root}; keys are relative to the data set")
        return self.root / key

    def put_file(self, key: str, path: Path, *, rows: int | None = None, kind: str = "") -> FileEntry:
        """Copy, make durable, read back, rename."""
        digest = digest_file(path)
        target = self.path(key)
        entry = FileEntry(key, digest.bytes, digest.sha256, rows, kind)
        if target.exists() and (target.samefile(path) or digest_file(target) == digest):
            return entry
        part = target.with_name(f".{target.name}.part")
        with _disk(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, part)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
        found = digest_file(part)
        if found != digest:
            part.unlink(missing_ok=True)
            raise VerificationError(f"{part} holds {found}, expected {digest}: the disk is not trustworthy")
        with _disk(target):
            part.replace(target)
            sync_directory(target.parent)
        with self._lock:
            self._sent += digest.bytes
        return entry

    def put_bytes(self, key: str, data: bytes, *, if_match: str | None = None, if_none_match: bool = False) -> str:
        """Atomic write; conditions are checked under a lock on the folder."""
        path = self.path(key)
        with self._locked(), _disk(path):
            found = _version(path.read_bytes()) if path.exists() else None
            if if_none_match and found is not None:
                raise ConflictError(f"{path} exists already; read it before writing")
            if if_match is not None and found != if_match:
                raise ConflictError(f"{path} was changed by somebody else; read it again and merge")
            write_atomic(path, data)
            path.chmod(0o644)  # a published file is for other users too; temporary files are private
        self._sent += len(data)
        return _version(data)

    def get_bytes(self, key: str) -> bytes:
        """The file's content."""
        return self.get_bytes_with_version(key)[0]

    def get_bytes_with_version(self, key: str) -> tuple[bytes, str]:
        """Content and its digest, which is the version here."""
        path = self.path(key)
        with _disk(path):
            data = path.read_bytes()
        return data, _version(data)

    def exists(self, key: str) -> bool:
        """Whether the file is there."""
        return self.path(key).is_file()

    def head(self, key: str) -> Head:
        """Size, and the digest of what is on the disk now."""
        path = self.path(key)
        if not path.is_file():
            raise MissingError(f"{path} is not there")
        digest = digest_file(path)
        return Head(key, digest.bytes, digest.sha256, digest.sha256)

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Files below the folder, hidden ones left out (they are unfinished or locks)."""
        for path in sorted(self.root.rglob("*")) if self.root.is_dir() else []:
            key = path.relative_to(self.root).as_posix()
            if key.startswith(prefix) and path.is_file() and not path.name.startswith("."):
                yield key, path.stat().st_size

    def open(self, key: str) -> BinaryIO:
        """The file, opened for reading."""
        path = self.path(key)
        with _disk(path):
            return path.open("rb")

    def download(self, key: str, path: Path) -> None:
        """Copy out, atomically."""
        source = self.path(key)
        with _disk(source):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.part")
            shutil.copyfile(source, part)
            part.replace(path)

    def delete(self, key: str) -> None:
        """Remove one file."""
        path = self.path(key)
        with _disk(path):
            path.unlink(missing_ok=True)

    def verify(self, entry: FileEntry) -> None:
        """Read every byte."""
        path = self.path(entry.key)
        if not path.is_file():
            raise VerificationError(f"{path} is missing; the manifest names it")
        digest = digest_file(path)
        if (digest.bytes, digest.sha256) != (entry.bytes, entry.sha256):
            raise VerificationError(
                f"{path}: found {digest.bytes} bytes, sha256 {digest.sha256}; "
                f"expected {entry.bytes} bytes, sha256 {entry.sha256}"
            )

    def abandon_uploads(self, prefix: str = "") -> int:
        """Remove copies that a crash left unfinished."""
        left = [p for p in self.root.rglob(".*.part") if p.relative_to(self.root).as_posix().startswith(prefix)]
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with _disk(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.root / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turn what the disk says into one clear error."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError(f"{path} is not there") from error
    except OSError as error:
        raise StorageError(
            f"{path}: {error.strerror or error}; free space, fix rights or choose another root"
        ) from error
