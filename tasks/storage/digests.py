"""Digests of files and parts. SHA-256 is ours (manifest, metadata); CRC64NVME is what S3 checks while receiving.

S3 can state a *full-object* checksum of a multipart upload for CRC64NVME only; a multipart SHA-256 is a digest of
digests (AWS S3 User Guide, "Checking object integrity"). Hence both.
"""

import base64
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from awscrt import checksums

from tasks.errors import StorageError

BLOCK_BYTES = 1 << 20
MAX_PARTS = 10_000
MIN_PART_BYTES = 5 << 20
"""Limits of S3 multipart uploads: parts an upload, and bytes of every part but the last."""

DEFAULT_PART_BYTES = 8 << 20
"""boto3's own default; small enough that an interrupted upload repeats little."""

MAX_OBJECT_BYTES = 5 << 40


@dataclass(frozen=True, slots=True)
class Digest:
    """Size and content of a file."""

    bytes: int
    sha256: str


def digest_file(path: Path) -> Digest:
    """Read a local file once. Raises StorageError when it cannot be read."""
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return Digest(file.tell(), sha256)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; write the file again") from error


def digest_stream(stream: BinaryIO) -> Digest:
    """Read a stream to its end in bounded memory."""
    sha256, size = hashlib.sha256(), 0
    while block := stream.read(BLOCK_BYTES):
        sha256.update(block)
        size += len(block)
    return Digest(size, sha256.hexdigest())


def crc64nvme(data: bytes) -> int:
    """CRC-64/NVME of one buffer."""
    return int(checksums.crc64nvme(data))


def combine(total: int, crc: int, length: int) -> int:
    """CRC64NVME of A+B from those of A and B and the length of B: no second pass over the file."""
    return int(checksums.combine_crc64nvme(total, crc, length))


def encode_crc(crc: int) -> str:
    """As S3 headers carry it: base64 of eight big-endian bytes."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def encode_md5(data: bytes) -> str:
    """Content-MD5, for stores that refuse newer checksums."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def part_size(
    size: int, wanted: int | None = None, *, max_parts: int = MAX_PARTS, min_part: int = MIN_PART_BYTES
) -> int:
    """Bytes a part, known before the first byte is sent, so that `size` fits in `max_parts` parts.

    `wanted` is raised to a whole number of MiB when it would need too many parts. Raises StorageError over 5 TiB.
    """
    if size > MAX_OBJECT_BYTES:
        raise StorageError(f"a file of {size} bytes is over S3's limit of 5 TiB; write smaller chunks")
    part = max(min_part, wanted or DEFAULT_PART_BYTES)
    least = -(-size // max_parts)
    return part if part >= least else -(-least // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a file: S3 counts from 1."""

    number: int
    offset: int
    length: int


def parts_of(size: int, part_bytes: int) -> Iterator[Part]:
    """The parts of a file of `size` bytes."""
    for index in range(-(-size // part_bytes)):
        yield Part(index + 1, index * part_bytes, min(part_bytes, size - index * part_bytes))


def read_part(handle: int, part: Part) -> bytes:
    """The bytes of one part; safe to call from many threads. Raises StorageError when the file has shrunk."""
    data = os.pread(handle, part.length, part.offset)
    while len(data) < part.length:
        more = os.pread(handle, part.length - len(data), part.offset + len(data))
        if not more:
            raise StorageError(f"the file ended at byte {part.offset + len(data)} while being sent; send it again")
        data += more
    return data
