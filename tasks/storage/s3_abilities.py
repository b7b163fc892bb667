"""What a store really does, found by trying: S3 look-alikes accept headers that they ignore."""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from tasks.storage.base import ConflictError
from tasks.storage.digests import crc64nvme, encode_crc, encode_md5
from tasks.storage.s3_client import Caller, Checksums, is_aws
from tasks.storage.s3_errors import S3Error, Trouble

PROBE = b"regen asks whether this store checks what it receives\n"
HEADER_UNKNOWN = (Trouble.REFUSED, Trouble.DAMAGED)
"""Answers to a header that a store does not take; every other trouble means that the store is unusable."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """`checks`: a wrong CRC64NVME is refused, a right one taken. `conditions`: If-None-Match is honoured.

    `md5`: a wrong Content-MD5 is refused (asked only where `checks` is not). With neither, anything is kept.
    """

    checks: bool
    conditions: bool
    md5: bool = True


def find(client: Any, caller: Caller, bucket: str, prefix: str, checksums: Checksums) -> Abilities:
    """A few tiny requests below `prefix`; AWS is known and not asked. `when_required` sends no checksum at all."""
    if is_aws(client.meta.endpoint_url):
        return Abilities(checks=checksums != "when_required", conditions=True)
    key = f"{prefix}.probe-{uuid4().hex}"
    try:
        checks = checksums != "when_required" and _checks(client, caller, bucket, key)
        md5 = checks or not _takes(client, caller, bucket, key, ContentMD5=encode_md5(b"something else"))
        return Abilities(checks, _conditions(client, caller, bucket, key), md5)
    finally:
        caller.attempt("removing a probe", lambda: client.delete_object(Bucket=bucket, Key=key))


def _checks(client: Any, caller: Caller, bucket: str, key: str) -> bool:
    crc = crc64nvme(PROBE)
    right, wrong = ({"ChecksumCRC64NVME": encode_crc(value)} for value in (crc, crc ^ 1))
    return _takes(client, caller, bucket, key, **right) and not _takes(client, caller, bucket, key, **wrong)


def _takes(client: Any, caller: Caller, bucket: str, key: str, **proof: str) -> bool:
    names = {"Bucket": bucket, "Key": key, "Body": PROBE, **proof}
    try:
        caller.attempt("asking for checksums", lambda: client.put_object(**names), once={Trouble.DAMAGED})
    except S3Error as error:
        if error.trouble in HEADER_UNKNOWN:
            return False
        raise
    return True


def _conditions(client: Any, caller: Caller, bucket: str, key: str) -> bool:
    names = {"Bucket": bucket, "Key": key, "Body": PROBE}
    caller.attempt("writing a probe", lambda: client.put_object(**names))
    try:
        caller.attempt("asking for conditional writes", lambda: client.put_object(**names, IfNoneMatch="*"))
    except ConflictError:
        return True
    except S3Error as error:
        if error.trouble not in HEADER_UNKNOWN:
            raise
    return False
