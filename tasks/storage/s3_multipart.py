"""Multipart upload that survives kill -9: an upload journal beside the file, and ListParts before anything is sent.

The journal (`.<name>.upload`, one JSON object a line) says which upload holds this very content; the store says which
parts it has. A part is kept only when both agree, or when the store lists a checksum equal to ours. ETags are used as
opaque names of parts, never as proof of content: the proof is the full-object CRC64NVME, or reading back.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tasks.errors import StorageError
from tasks.storage import digests
from tasks.storage.base import MissingError
from tasks.storage.digests import Digest, Part
from tasks.storage.s3_client import Caller
from tasks.storage.s3_errors import S3Error, Trouble

WORKERS = 8
WORTHLESS = (Trouble.SKEW, Trouble.GONE, Trouble.DAMAGED)
"""Troubles after which the parts that arrived are of no use: the upload is dropped, no orphan stays."""

MEMORY_BYTES = 128 << 20
"""Parts in memory together take at most this (one part at least), whatever the file's size."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where an object goes and how parts prove themselves there."""

    client: Any
    caller: Caller
    bucket: str
    key: str
    checks: bool
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sent:
    """One part that the store has."""

    number: int
    etag: str
    crc: int
    length: int


class Journal:
    """Which upload holds which parts of one content; append-only, a torn last line is ignored."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path, self._identity = path, identity
        self.upload_id: str | None = None
        self.parts: dict[int, tuple[str, int]] = {}
        self._read()

    def _read(self) -> None:
        try:
            lines = self.path.read_text().splitlines()
            header = json.loads(lines[0])
            if {name: header.get(name) for name in self._identity} != self._identity:
                return
            self.upload_id = header["upload_id"]
            for line in lines[1:]:
                part = json.loads(line)
                self.parts[part["number"]] = (part["etag"], part["crc"])
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return

    def begin(self, upload_id: str) -> None:
        """A new upload; what an older journal said is gone."""
        self.upload_id, self.parts = upload_id, {}
        self.path.write_text(json.dumps({**self._identity, "upload_id": upload_id}) + "\n")

    def add(self, part: Sent) -> None:
        """The store acknowledged `part`."""
        with self.path.open("a") as file:
            file.write(
                "\n" * self._torn() + json.dumps({"number": part.number, "etag": part.etag, "crc": part.crc}) + "\n"
            )

    def _torn(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"

    def end(self) -> None:
        """The object is complete, or the upload is given up."""
        self.path.unlink(missing_ok=True)


def upload(target: Target, path: Path, digest: Digest, part_bytes: int, count: Any) -> str | None:
    """Send what is missing and complete the object; returns its CRC64NVME (base64) where the store checks it.

    `count(n)` is told of every payload that leaves. Raises StorageError; parts that arrived stay for the next try,
    except under a skewed clock, where the upload is dropped.
    """
    identity = {"bucket": target.bucket, "key": target.key, "sha256": digest.sha256, "bytes": digest.bytes}
    identity |= {"part_bytes": part_bytes, "endpoint": target.client.meta.endpoint_url, "checks": target.checks}
    journal = Journal(path.with_name(f".{path.name}.upload"), identity)
    with _opened(path) as handle:
        have = _already_there(target, journal, handle, digest.bytes, part_bytes)
        if journal.upload_id is None:
            journal.begin(_create(target))
        try:
            parts = _send_missing(target, journal, handle, digest.bytes, part_bytes, have, count)
            return _complete(target, journal, parts)
        except S3Error as error:
            if error.trouble in WORTHLESS:
                abort(target, journal)
            raise


def abort(target: Target, journal: Journal) -> None:
    """Leave no orphan: unfinished uploads cost money and are invisible in listings."""
    upload_id = journal.upload_id
    journal.end()
    if upload_id:
        try:
            target.client.abort_multipart_upload(Bucket=target.bucket, Key=target.key, UploadId=upload_id)
        except Exception as error:
            # The first error is the one to report; a lifecycle rule or abandon_uploads removes what stays.
            error.add_note("the unfinished upload could not be dropped")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; write the file again") from error
    try:
        yield handle
    finally:
        os.close(handle)


def _create(target: Target) -> str:
    checks = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"} if target.checks else {}
    answer = target.caller.attempt(
        f"starting {target.key}",
        lambda: target.client.create_multipart_upload(Bucket=target.bucket, Key=target.key, **target.extra, **checks),
    )
    return str(answer["UploadId"])


def _already_there(target: Target, journal: Journal, handle: int, size: int, part_bytes: int) -> dict[int, Sent]:
    if journal.upload_id is None:
        return {}
    try:
        listed = list(_list_parts(target, journal.upload_id))
    except (MissingError, S3Error) as error:
        if isinstance(error, S3Error) and error.trouble is not Trouble.GONE:
            raise
        journal.upload_id = None
        return {}
    expected = {part.number: part for part in digests.parts_of(size, part_bytes)}
    have: dict[int, Sent] = {}
    for there in listed:
        part = expected.get(there["PartNumber"])
        if part is None or there["Size"] != part.length:
            continue
        crc = digests.crc64nvme(digests.read_part(handle, part))
        noted = journal.parts.get(part.number) == (there["ETag"], crc)
        if noted or there.get("ChecksumCRC64NVME") == digests.encode_crc(crc):
            have[part.number] = Sent(part.number, there["ETag"], crc, part.length)
    return have


def _list_parts(target: Target, upload_id: str) -> Iterator[dict[str, Any]]:
    marker = 0
    while True:
        names = {"Bucket": target.bucket, "Key": target.key, "UploadId": upload_id, "PartNumberMarker": marker}
        page = target.caller.attempt(f"listing parts of {target.key}", partial(target.client.list_parts, **names))
        yield from page.get("Parts", [])
        following = int(page.get("NextPartNumberMarker") or 0)
        if not page.get("IsTruncated") or following <= marker:
            return
        marker = following


def _send_missing(
    target: Target, journal: Journal, handle: int, size: int, part_bytes: int, have: dict[int, Sent], count: Any
) -> list[Sent]:
    """All parts in order. At most `workers` parts are in memory; the first final error stops the rest."""
    missing = (part for part in digests.parts_of(size, part_bytes) if part.number not in have)
    workers = max(1, min(WORKERS, MEMORY_BYTES // part_bytes))
    done, failure = dict(have), None
    with ThreadPoolExecutor(workers, thread_name_prefix="upload") as pool:
        running: set[Future[Sent]] = set()
        for part in missing:
            running.add(pool.submit(_send, target, str(journal.upload_id), handle, part, count))
            if len(running) < workers:
                continue
            failure = _collect(running, journal, done, FIRST_COMPLETED)
            if failure:
                break
        failure = _collect(running, journal, done, "ALL_COMPLETED") or failure
    if failure:
        raise failure
    return [done[number] for number in sorted(done)]


def _collect(running: set[Future[Sent]], journal: Journal, done: dict[int, Sent], until: str) -> BaseException | None:
    finished, _ = wait(running, return_when=until)
    running -= finished
    failure: BaseException | None = None
    for future in finished:
        error = future.exception()
        if error is None:
            sent = future.result()
            journal.add(sent)
            done[sent.number] = sent
        failure = failure or error
    return failure


def _send(target: Target, upload_id: str, handle: int, part: Part, count: Any) -> Sent:
    data = digests.read_part(handle, part)
    crc = digests.crc64nvme(data)
    proof = (
        {"ChecksumCRC64NVME": digests.encode_crc(crc)} if target.checks else {"ContentMD5": digests.encode_md5(data)}
    )
    names = {"Bucket": target.bucket, "Key": target.key, "UploadId": upload_id, "PartNumber": part.number}

    def put() -> Any:
        count(part.length)
        return target.client.upload_part(**names, Body=data, **proof)

    answer = target.caller.attempt(f"sending part {part.number} of {target.key}", put)
    return Sent(part.number, answer["ETag"], crc, part.length)


def _complete(target: Target, journal: Journal, parts: list[Sent]) -> str | None:
    crc = 0
    for part in parts:
        crc = digests.combine(crc, part.crc, part.length)
    whole = {"ChecksumCRC64NVME": digests.encode_crc(crc), "ChecksumType": "FULL_OBJECT"} if target.checks else {}
    names = [
        {"PartNumber": p.number, "ETag": p.etag}
        | ({"ChecksumCRC64NVME": digests.encode_crc(p.crc)} if target.checks else {})
        for p in parts
    ]
    target.caller.attempt(
        f"completing {target.key}",
        lambda: target.client.complete_multipart_upload(
            Bucket=target.bucket,
            Key=target.key,
            UploadId=journal.upload_id,
            MultipartUpload={"Parts": names},
            **whole,
        ),
    )
    journal.end()
    return whole.get("ChecksumCRC64NVME")
