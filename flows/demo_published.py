"""Fetch what was published, as a trainer would: all files of the manifest, verified, then the card and the manifest."""

import hashlib
from pathlib import Path
from typing import Any

from flows.spec import RegenSpec
from tasks.cuts import count_cuts
from tasks.errors import VerificationError
from tasks.provisioning.local_store import LocalStore
from tasks.runs import write_atomic
from tasks.storage import open_store
from tasks.upload.counts import total
from tasks.upload.layout import CARD, MANIFEST
from tasks.upload.manifest import entries, parse


def read_back(spec: RegenSpec, server: LocalStore, folder: Path) -> dict[str, Any]:
    """Copy the newest published snapshot to `folder`; returns what the last line says of it.

    That is `store`, `manifest` (a path), `files` (relative to the manifest's folder), `token_rows`, and in `turns` the
    sums of `tasks.cuts.count_cuts`. Files that are there already with the manifest's digest are not fetched again. The
    manifest is written last. Raises VerificationError when a file differs from the manifest, StorageError when the
    store does not give it.
    """
    url = spec.publish.store or str(folder)
    keys = {"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
    store = open_store(url, endpoint_url=server.endpoint_url, region=server.region, credentials=keys)
    if not store.exists(MANIFEST):
        return {"store": url, "manifest": None, "files": []}
    data = store.get_bytes(MANIFEST)
    manifest = parse(data, f"{url}/{MANIFEST}")
    files = []
    for entry in entries(manifest, all_snapshots=False):
        path = folder / entry.key
        if not path.exists() or sha256(path) != entry.sha256:
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download(entry.key, path)
            if (found := sha256(path)) != entry.sha256:
                raise VerificationError(
                    f"{url}/{entry.key}: sha256 {found}, the manifest says {entry.sha256}; publish it again"
                )
        files.append(entry.key)
    if store.exists(CARD):  # derived from the manifest, which therefore has no digest of it
        write_atomic(folder / CARD, store.get_bytes(CARD))
        files.append(CARD)
    write_atomic(folder / MANIFEST, data)
    current = manifest["current"]
    return {
        "store": url,
        "manifest": str(folder / MANIFEST),
        "files": sorted(files),
        "token_rows": current["rows"].get("tokens", 0),
        "turns": total(count_cuts(folder / key) for key in current["files"].get("completions", [])),
    }


def sha256(path: Path) -> str:
    """Digest of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
