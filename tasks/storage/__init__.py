"""Where data goes and is proven: one `Store` for a local folder, AWS S3 and everything that speaks S3."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tasks.errors import StorageError
from tasks.storage.base import ConflictError, Head, MissingError, Store
from tasks.storage.local import LocalStore
from tasks.storage.s3_client import Checksums, Retry

__all__ = ["ConflictError", "Head", "LocalStore", "MissingError", "Retry", "Store", "open_store"]


def open_store(
    url: str | Path,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    checksums: Checksums = "auto",
    part_mb: int | None = None,
    credentials: Mapping[str, Any] | None = None,
    retry: Retry | None = None,
) -> Store:
    """The store at `url`: a folder (path or `file://`) or `s3://bucket/prefix`. Nothing is contacted yet.

    Credentials come from the usual AWS chain unless `credentials` gives boto3 session arguments
    (`aws_access_key_id`, `aws_secret_access_key`, `aws_session_token`). Raises StorageError on an unknown scheme.
    """
    text = str(url)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme == "s3":
        from tasks.storage.s3 import S3Store

        return S3Store(
            text,
            endpoint_url=endpoint_url,
            region=region,
            checksums=checksums,
            part_bytes=part_mb << 20 if part_mb else None,
            credentials=credentials,
            retry=retry,
        )
    if scheme == "file":
        return LocalStore(Path(unquote(urlsplit(text).path)))
    if scheme:
        raise StorageError(f"{text}: unknown store {scheme!r}; use a folder or s3://bucket/prefix")
    return LocalStore(Path(text))
