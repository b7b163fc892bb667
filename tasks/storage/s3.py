"""A bucket prefix as a store: every object is proven, by the store's own checksum or by reading it back."""

import contextlib
import hashlib
import mimetypes
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit
from uuid import uuid4

from tasks.errors import StorageError, VerificationError
from tasks.records import FileEntry
from tasks.storage import digests, s3_abilities, s3_multipart
from tasks.storage.base import READS, SHA256, ConflictError, Head, MissingError
from tasks.storage.digests import Digest, digest_file
from tasks.storage.reader import buffered
from tasks.storage.s3_client import Caller, Checksums, Retry, make_client
from tasks.storage.s3_errors import DamagedError, S3Error, Trouble

STAGE = ".probe-stage-"
"""Prefix of objects that are about to be copied to their key; listings leave `.probe-` out."""

SENDS = 3
"""Times a whole object is sent again after its stored bytes were found wrong."""

Tries = list[int]
"""Sizes of the requests that one write needed; the class has a method called `list`."""


class S3Store:
    """`s3://bucket/prefix` on AWS or anything that speaks S3. Made by `open_store`."""

    def __init__(
        self,
        url: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        checksums: Checksums = "auto",
        part_bytes: int | None = None,
        credentials: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc:
            raise StorageError(f"{url!r} is not s3://bucket/prefix")
        self.bucket, self._prefix = parts.netloc, _prefix(parts.path)
        self._part_bytes, self._checksums = part_bytes, checksums
        self.client = make_client(
            endpoint_url=endpoint_url, region=region, checksums=checksums, credentials=credentials
        )
        self.caller = Caller(self.url, retry or Retry())
        self._abilities: s3_abilities.Abilities | None = None
        self._lock = threading.Lock()
        self._sent = 0

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`, no trailing slash."""
        return f"s3://{self.bucket}/{self._prefix}".rstrip("/")

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that left, repeats included."""
        return self._sent

    @property
    def abilities(self) -> s3_abilities.Abilities:
        """What this store really does, asked once."""
        with self._lock:
            if self._abilities is None:
                self._abilities = s3_abilities.find(
                    self.client, self.caller, self.bucket, self._prefix, self._checksums
                )
            return self._abilities

    def put_file(self, key: str, path: Path, *, rows: int | None = None, kind: str = "") -> FileEntry:
        """Single request or resumable multipart; then size, our digest and, where needed, every byte are checked."""
        digest = digest_file(path)
        entry = FileEntry(key, digest.bytes, digest.sha256, rows, kind)
        if self._has(key, digest):
            return entry
        for attempt in range(1, SENDS + 1):
            try:
                self._send(key, path, digest)
            except S3Error as error:
                if attempt == SENDS or error.trouble not in (Trouble.DAMAGED, Trouble.GONE):
                    raise
                continue
            if self._proven(key, digest):
                return entry
        self.delete(key)
        raise VerificationError(f"{self.url}/{key}: stored bytes stayed wrong after {SENDS} uploads; it was removed")

    def put_bytes(self, key: str, data: bytes, *, if_match: str | None = None, if_none_match: bool = False) -> str:
        """One request. Where the store ignores conditions, the version is compared just before and bytes just after."""
        if not (self.abilities.checks or self.abilities.md5):
            return self._put_staged(key, data, if_match, if_none_match)
        conditions: dict[str, Any] = {}
        if self.abilities.conditions:
            conditions |= {"IfMatch": if_match} if if_match else {}
            conditions |= {"IfNoneMatch": "*"} if if_none_match else {}
        elif if_match or if_none_match:
            self._compare(key, if_match)
        tries: Tries = []
        try:
            version = self._put(key, data, hashlib.sha256(data).hexdigest(), conditions, tries)
        except MissingError as error:
            raise ConflictError(f"{error}: it was to be replaced") from error
        except ConflictError:
            # Where the request was repeated, the answer to our own earlier try may have been lost.
            found, version = self._peek(key)
            if len(tries) < 2 or found != data:
                raise
            return version
        if conditions and self.abilities.checks:
            return version
        found, version = self._peek(key)
        if found != data:
            raise ConflictError(f"{self.url}/{key} was written by somebody else at the same time; read it and merge")
        return version

    def get_bytes(self, key: str) -> bytes:
        """A small object, checked against our digest."""
        return self.get_bytes_with_version(key)[0]

    def get_bytes_with_version(self, key: str) -> tuple[bytes, str]:
        """Content and ETag (as a version only)."""

        def read() -> tuple[bytes, str]:
            answer = self.client.get_object(Bucket=self.bucket, Key=self._prefix + key)
            data = answer["Body"].read()
            wanted = answer.get("Metadata", {}).get(SHA256)
            if len(data) != answer["ContentLength"] or (wanted and hashlib.sha256(data).hexdigest() != wanted):
                raise DamagedError(f"{len(data)} bytes that do not have the recorded sha256")
            return data, str(answer["ETag"])

        return self.caller.attempt(f"reading {key}", read)

    def exists(self, key: str) -> bool:
        """Whether the key is there."""
        try:
            self.head(key)
        except MissingError:
            return False
        return True

    def head(self, key: str) -> Head:
        """One HEAD request."""
        extra = {"ChecksumMode": "ENABLED"} if self._abilities and self._abilities.checks else {}
        found = self.caller.attempt(
            f"looking at {key}",
            lambda: self.client.head_object(Bucket=self.bucket, Key=self._prefix + key, **extra),
        )
        metadata = dict(found.get("Metadata", {}))
        full = found.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
        crc = found.get("ChecksumCRC64NVME") if full else None
        return Head(key, int(found["ContentLength"]), str(found["ETag"]), metadata.get(SHA256), crc, metadata)

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """All pages; probes of this project are left out."""
        token: dict[str, Any] = {}
        while True:
            names = {"Bucket": self.bucket, "Prefix": self._prefix + prefix, **token}
            page = self.caller.attempt(f"listing {prefix}", partial(self.client.list_objects_v2, **names))
            for item in page.get("Contents", []):
                key = item["Key"][len(self._prefix) :]
                if not key.startswith(".probe-"):
                    yield key, int(item["Size"])
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def open(self, key: str) -> BinaryIO:
        """Ranged reads."""

        def fetch(start: int, length: int) -> bytes:
            return self.caller.attempt(f"reading {key}", lambda: self._range(key, start, length))

        return buffered(self.head(key).bytes, fetch)

    def download(self, key: str, path: Path) -> None:
        """Stream to a temporary name, compare with our digest where it is recorded, rename."""
        wanted = self.head(key)
        part = path.with_name(f".{path.name}.part")
        for _ in range(READS):
            digest = self.caller.attempt(f"reading {key}", lambda: self._stream(key, part))
            if digest.bytes == wanted.bytes and wanted.sha256 in (None, digest.sha256):
                part.replace(path)
                return
        part.unlink(missing_ok=True)
        raise VerificationError(f"{self.url}/{key}: read {digest}, expected {wanted.bytes} bytes, {wanted.sha256}")

    def delete(self, key: str) -> None:
        """Remove one key."""
        self.caller.attempt(
            f"removing {key}", lambda: self.client.delete_object(Bucket=self.bucket, Key=self._prefix + key)
        )

    def verify(self, entry: FileEntry) -> None:
        """Read every byte, again when it differs: a damaged answer is not a damaged object."""
        found: Digest | None = None
        for _ in range(READS):
            try:
                found = self.caller.attempt(f"reading {entry.key}", lambda: self._stream(entry.key, None))
            except MissingError as error:
                raise VerificationError(f"{self.url}/{entry.key} is missing; the manifest names it") from error
            if (found.bytes, found.sha256) == (entry.bytes, entry.sha256):
                return
        raise VerificationError(
            f"{self.url}/{entry.key}: found {found}, expected {entry.bytes} bytes, sha256 {entry.sha256}"
        )

    def abandon_uploads(self, prefix: str = "") -> int:
        """Abort unfinished multipart uploads below `prefix`."""
        page = self.caller.attempt(
            "listing uploads",
            lambda: self.client.list_multipart_uploads(Bucket=self.bucket, Prefix=self._prefix + prefix),
        )
        for item in page.get("Uploads", []):
            names = {"Bucket": self.bucket, "Key": item["Key"], "UploadId": item["UploadId"]}
            with contextlib.suppress(MissingError):
                self.caller.attempt("dropping an upload", partial(self.client.abort_multipart_upload, **names))
        return len(page.get("Uploads", []))

    def _count(self, size: int) -> None:
        with self._lock:
            self._sent += size

    def _has(self, key: str, digest: Digest) -> bool:
        """Whether this very content is there: its metadata alone is a claim, so what nobody checked is read back."""
        try:
            return self._proven(key, digest)
        except MissingError:
            return False

    def _proven(self, key: str, digest: Digest) -> bool:
        checks = self.abilities.checks
        found = self.head(key)
        if (found.bytes, found.sha256) != (digest.bytes, digest.sha256):
            return False
        if checks:
            return True
        try:
            self.verify(FileEntry(key, digest.bytes, digest.sha256))
        except VerificationError:
            return False
        return True

    def _send(self, key: str, path: Path, digest: Digest) -> None:
        part_bytes = digests.part_size(digest.bytes, self._part_bytes)
        if digest.bytes <= part_bytes:
            self._put(key, path.read_bytes(), digest.sha256, {}, [])
            return
        target = s3_multipart.Target(
            self.client, self.caller, self.bucket, self._prefix + key, self.abilities.checks, _extra(key, digest.sha256)
        )
        try:
            s3_multipart.upload(target, path, digest, part_bytes, self._count)
        except (MissingError, S3Error) as error:
            # A Complete whose answer was lost leaves no upload, but the object.
            gone = isinstance(error, MissingError) or error.trouble is Trouble.GONE
            if not gone or not self._has(key, digest):
                raise

    def _put(self, key: str, data: bytes, sha256: str, conditions: dict[str, Any], tries: Tries) -> str:
        """The new version; `tries` gets one item for every request that was sent."""
        checks = self.abilities.checks
        crc = digests.encode_crc(digests.crc64nvme(data))
        proof = {"ChecksumCRC64NVME": crc} if checks else {"ContentMD5": digests.encode_md5(data)}
        names = {"Bucket": self.bucket, "Key": self._prefix + key, **_extra(key, sha256), **proof, **conditions}

        def put() -> Any:
            tries.append(len(data))
            self._count(len(data))
            return self.client.put_object(Body=data, **names)

        return str(self.caller.attempt(f"sending {key}", put)["ETag"])

    def _put_staged(self, key: str, data: bytes, if_match: str | None, if_none_match: bool) -> str:
        """For stores that keep whatever arrives: write aside, read back, then copy inside the store.

        A reader never sees damaged bytes under `key`; the condition is compared just before the copy.
        """
        stage = f"{STAGE}{uuid4().hex}"
        try:
            for _ in range(SENDS):
                self._put(stage, data, hashlib.sha256(data).hexdigest(), {}, [])
                if self._proven(stage, Digest(len(data), hashlib.sha256(data).hexdigest())):
                    break
            else:
                raise VerificationError(f"{self.url}/{key}: stored bytes stayed wrong after {SENDS} tries")
            if if_match or if_none_match:
                self._compare(key, if_match)
            names = {"Bucket": self.bucket, "Key": self._prefix + key}
            source = {"Bucket": self.bucket, "Key": self._prefix + stage}
            self.caller.attempt(f"publishing {key}", lambda: self.client.copy_object(CopySource=source, **names))
        finally:
            self.delete(stage)
        found, version = self._peek(key)
        if found != data:
            raise ConflictError(f"{self.url}/{key} was written by somebody else at the same time; read it and merge")
        return version

    def _compare(self, key: str, if_match: str | None) -> None:
        try:
            version = self.head(key).version
        except MissingError:
            version = None
        if version != if_match:
            raise ConflictError(f"{self.url}/{key} was changed by somebody else; read it again and merge")

    def _peek(self, key: str) -> tuple[bytes | None, str]:
        try:
            return self.get_bytes_with_version(key)
        except MissingError:
            return None, ""

    def _range(self, key: str, start: int, length: int) -> bytes:
        answer = self.client.get_object(
            Bucket=self.bucket, Key=self._prefix + key, Range=f"bytes={start}-{start + length - 1}"
        )
        data: bytes = answer["Body"].read()
        if len(data) != length:
            raise DamagedError(f"{len(data)} bytes of the {length} asked for")
        return data

    def _stream(self, key: str, path: Path | None) -> Digest:
        answer = self.client.get_object(Bucket=self.bucket, Key=self._prefix + key)
        with contextlib.closing(answer["Body"]) as body, contextlib.ExitStack() as stack:
            if path is None:
                return digests.digest_stream(body)
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("wb"))
            return digests.digest_stream(_Tee(body.read, file.write))  # type: ignore[arg-type]


class _Tee:
    """Hands on what it reads."""

    def __init__(self, read: Callable[[int], bytes], write: Callable[[bytes], int]) -> None:
        self._read, self._write = read, write

    def read(self, size: int) -> bytes:
        data = self._read(size)
        self._write(data)
        return data


def _prefix(path: str) -> str:
    inner = path.strip("/")
    return f"{inner}/" if inner else ""


def _extra(key: str, sha256: str) -> dict[str, Any]:
    kind = mimetypes.guess_type(key)[0]
    return {"Metadata": {SHA256: sha256}} | ({"ContentType": kind} if kind else {})
