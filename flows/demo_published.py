"""Fetch what was published, as a trainer would: the manifest, then every file that it names, each verified."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.spec import RegenSpec
from tasks.errors import VerificationError
from tasks.provisioning.local_store import LocalStore
from tasks.runs import write_atomic
from tasks.storage import open_store

MANIFEST = "manifest.json"


def read_back(spec: RegenSpec, server: LocalStore, folder: Path) -> dict[str, Any]:
    """Copy the published set to `folder`; returns `store`, `manifest` and `files` for the last line.

    Files that are there already with the manifest's digest are not fetched again. The manifest is written last. Raises
    VerificationError when a file differs from the manifest, StorageError when the store does not give it.
    """
    url = spec.publish.store or str(folder)
    keys = {"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
    store = open_store(url, endpoint_url=server.endpoint_url, region=server.region, credentials=keys)
    if not store.exists(MANIFEST):
        return {"store": url, "manifest": None, "files": []}
    data = store.get_bytes(MANIFEST)
    files = []
    for key, digest in sorted(published_files(json.loads(data)).items()):
        path = folder / key
        if not path.exists() or sha256(path) != digest:
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download(key, path)
            if (found := sha256(path)) != digest:
                raise VerificationError(f"{url}/{key}: sha256 {found}, the manifest says {digest}; publish it again")
        files.append(str(path))
    write_atomic(folder / MANIFEST, data)
    return {"store": url, "manifest": str(folder / MANIFEST), "files": files}


def published_files(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Key and sha256 of every file that the manifest names, wherever it names it."""
    return dict(_entries(manifest))


def _entries(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        if isinstance(value.get("key"), str) and isinstance(value.get("sha256"), str):
            yield value["key"], value["sha256"]
        for inner in value.values():
            yield from _entries(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _entries(inner)


def sha256(path: Path) -> str:
    """Digest of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
