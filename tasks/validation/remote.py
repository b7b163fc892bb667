"""Sources that are not files here yet: buckets, and data sets of the Hugging Face hub."""

import fnmatch
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from tasks.errors import DatasetError, StorageError
from tasks.validation.settings import SourceSettings

HUB_BATCH = 1000
"""Rows taken from a streamed data set at a time."""


def from_bucket(
    url: str, settings: SourceSettings, downloads: Path, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, str]]:
    """(URL, local copy) of an object, of every data file under a prefix, or of what a glob matches.

    Raises DatasetError when the bucket cannot be read or holds nothing that fits.
    """
    from tasks.storage import open_store

    bucket, _, key = url.removeprefix("s3://").partition("/")
    try:
        store = open_store(f"s3://{bucket}", endpoint_url=settings.s3_endpoint_url)
        for name in _keys(store, key, wanted):
            local = downloads / "s3" / bucket / name
            local.parent.mkdir(parents=True, exist_ok=True)
            store.download(name, local)
            yield f"s3://{bucket}/{name}", str(local)
    except StorageError as error:
        raise DatasetError(f"cannot read {url}: {error}") from error


def _keys(store: Any, key: str, wanted: Callable[[str], bool]) -> list[str]:
    fixed = re.split(r"[*?\[]", key, maxsplit=1)[0]
    if fixed != key:
        return [name for name, _ in store.list(fixed) if fnmatch.fnmatchcase(name, key)]
    if key and not key.endswith("/") and store.exists(key):
        return [key]
    prefix = f"{key.rstrip('/')}/" if key else ""
    return [name for name, size in store.list(prefix) if size and wanted(name)]


def from_hub(url: str, settings: SourceSettings, downloads: Path) -> Iterator[tuple[str, str]]:
    """(URL, local Parquet file) of `hf://org/name[:config]`, streamed to disk in batches.

    Raises DatasetError when the hub does not know it, or cannot be reached.
    """
    name, _, config = url.removeprefix("hf://").partition(":")
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80]
    local = (
        downloads / "hub" / f"{readable}-{xxhash.xxh3_64_hexdigest(url.encode())}.jsonl"
    )  # configs of one set are two files
    local.parent.mkdir(parents=True, exist_ok=True)
    try:
        _stream(name, config or None, settings, local)
    except (OSError, ValueError, RuntimeError, ImportError, pa.ArrowException) as error:
        raise DatasetError(
            f"cannot load {url} (split {settings.split!r}): {type(error).__name__}: {str(error)[:300]}"
        ) from error
    yield url, str(local)


def _stream(name: str, config: str | None, settings: SourceSettings, local: Path) -> None:
    import datasets
    import orjson

    found = datasets.load_dataset(name, config, split=settings.split, streaming=True)
    if settings.limit is not None:
        found = found.take(settings.limit)
    with local.open("wb") as file:
        for row in found:
            file.write(orjson.dumps(row, default=str, option=orjson.OPT_NON_STR_KEYS) + b"\n")
