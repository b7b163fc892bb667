"""Fetch what was published, as a trainer would: every file that the manifest names, verified, then the manifest."""

import hashlib
from pathlib import Path
from typing import Any

from flows.spec import RegenSpec
from tasks.errors import VerificationError
from tasks.provisioning.local_store import LocalStore
from tasks.runs import write_atomic
from tasks.storage import open_store
from tasks.upload.layout import MANIFEST
from tasks.upload.manifest import entries, parse


def read_back(spec: RegenSpec, server: LocalStore, folder: Path) -> dict[str, Any]:
    """Copy the newest published snapshot to `folder`; returns `store`, `manifest` and `files` for the last line.

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
    for entry in entries(parse(data, f"{url}/{MANIFEST}"), all_snapshots=False):
        path = folder / entry.key
        if not path.exists() or sha256(path) != entry.sha256:
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download(entry.key, path)
            if (found := sha256(path)) != entry.sha256:
                raise VerificationError(
                    f"{url}/{entry.key}: sha256 {found}, the manifest says {entry.sha256}; publish it again"
                )
        files.append(str(path))
    write_atomic(folder / MANIFEST, data)
    return {"store": url, "manifest": str(folder / MANIFEST), "files": sorted(files)}


def sha256(path: Path) -> str:
    """Digest of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
