"""The published index. It is written last, whole or not at all, and never over somebody else's change.

`parts` holds every published chunk with its files; a snapshot names the parts it adds and drops relative to the one
before; `current` spells out the newest snapshot so that a reader needs nothing else. A daily run of a few prompts thus
adds a few hundred bytes and refers to everything older.
"""

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from tasks.errors import StorageError, VerificationError
from tasks.records import FileEntry
from tasks.storage import ConflictError, MissingError, Store
from tasks.storage.base import READS
from tasks.upload.layout import CONVENTIONS, FORMAT, MANIFEST, OWN, to_entry

Manifest = dict[str, Any]
TRIES = 20
"""Lost races before giving up; with a lease held there is nobody to race with."""

SHOWN = 5


def empty(dataset: str) -> Manifest:
    """A manifest that publishes nothing."""
    return {
        "format": FORMAT,
        "dataset": dataset,
        "generation": 0,
        "parts": {},
        "snapshots": [],
        "current": {},
        "conventions": dict(CONVENTIONS),
    }


def read_manifest(store: Store) -> tuple[Manifest | None, str | None]:
    """The manifest and its version, or (None, None) where nothing is published.

    Raises VerificationError when it is damaged or not ours.
    """
    for attempt in range(READS):
        try:
            data, version = store.get_bytes_with_version(MANIFEST)
        except MissingError:
            return None, None
        try:
            return parse(data, f"{store.url}/{MANIFEST}"), version
        except VerificationError:
            if attempt == READS - 1:
                raise
    raise AssertionError("unreachable")


def parse(data: bytes, name: str) -> Manifest:
    """Check format and self-digest. Raises VerificationError."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise VerificationError(
            f"{name} is not JSON ({error}); restore it from a backup or another snapshot"
        ) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise VerificationError(f"{name} is not ours: found format {found!r}, expected {FORMAT!r}")
    if value.get("sha256") != digest(value):
        raise VerificationError(f"{name} does not have the digest that it states: it was changed by hand or damaged")
    return value


def digest(manifest: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON of everything but the digest itself."""
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def dump(manifest: Manifest) -> bytes:
    """The bytes that are published; sets `sha256`."""
    manifest["sha256"] = digest(manifest)
    return json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n"


def update_manifest(store: Store, dataset: str, change: Callable[[Manifest], Manifest | None]) -> Manifest:
    """Apply `change` to the newest manifest and publish the result with optimistic concurrency.

    `change` may run several times and returns None when there is nothing to do. No manifest that names a missing or
    short file is ever written. Raises StorageError after too many lost races, VerificationError on missing files.
    """
    for attempt in range(TRIES):
        found, version = read_manifest(store)
        wanted = change(json.loads(json.dumps(found)) if found else empty(dataset))
        if wanted is None:
            return found or empty(dataset)
        wanted["generation"] = (found or {}).get("generation", 0) + 1
        wanted["updated"] = datetime.now(UTC).isoformat(timespec="seconds")
        wanted["current"] = materialise(wanted)
        check_present(store, wanted)
        try:
            store.put_bytes(MANIFEST, dump(wanted), if_match=version, if_none_match=version is None)
        except ConflictError:
            time.sleep(random.uniform(0, 0.1 * (attempt + 1)))
            continue
        return wanted
    raise StorageError(f"{store.url}/{MANIFEST} changed {TRIES} times while being written; stop the other run")


def active_parts(manifest: Manifest, snapshot: str | None = None) -> list[str]:
    """Part ids of one snapshot (default: the newest), oldest first: what was added less what was dropped."""
    active: dict[str, None] = {}
    for entry in manifest["snapshots"]:
        for part in entry["drops"]:
            active.pop(part, None)
        active.update(dict.fromkeys(entry["adds"]))
        if entry["id"] == snapshot:
            break
    return list(active)


def materialise(manifest: Manifest) -> dict[str, Any]:
    """The newest snapshot, spelled out: keys by kind and the sums that a reader compares."""
    keys: dict[str, list[str]] = {}
    rows: dict[str, int] = {}
    size = 0
    for part in active_parts(manifest):
        for value in manifest["parts"][part]["files"]:
            keys.setdefault(value["kind"], []).append(value["key"])
            rows[value["kind"]] = rows.get(value["kind"], 0) + (value.get("rows") or 0)
            size += value["bytes"]
    newest = manifest["snapshots"][-1]["id"] if manifest["snapshots"] else None
    return {"snapshot": newest, "files": keys, "rows": rows, "bytes": size}


def entries(manifest: Manifest, *, all_snapshots: bool = True) -> Iterator[FileEntry]:
    """Every file that the manifest names: parts (superseded ones too, unless only the newest is wanted), documents."""
    chosen = manifest["parts"] if all_snapshots else active_parts(manifest)
    for part in chosen:
        yield from (to_entry(value) for value in manifest["parts"][part]["files"])
    for snapshot in manifest["snapshots"]:
        yield from (to_entry(value) for value in snapshot["documents"])


def check_present(store: Store, manifest: Manifest) -> None:
    """Every named file is in the store with its size: one listing, whatever the number of files."""
    there = dict(store.list("runs/"))
    wrong = [e.key for e in entries(manifest) if there.get(e.key) != e.bytes]
    if wrong:
        raise VerificationError(
            f"{store.url}: {len(wrong)} files are missing or short, first {', '.join(wrong[:SHOWN])}; "
            "nothing was published: upload the chunks again (the run folder still has them)"
        )


def refuse_foreign(store: Store) -> None:
    """Refuse a destination that holds files of somebody else and no data set of ours; nothing is ever deleted.

    Raises StorageError naming them.
    """
    try:
        if read_manifest(store)[0] is not None:
            return
        hint = ""
    except VerificationError as error:
        hint = f" ({error})"
    foreign: list[str] = []
    for key, _ in store.list():
        if hint or not key.startswith(OWN):
            foreign.append(key)
        if len(foreign) > SHOWN:
            break
    foreign.sort(key=lambda key: key.startswith(OWN))
    if foreign:
        raise StorageError(
            f"{store.url} already holds files that are not a data set of this program{hint}: "
            f"{', '.join(foreign[:SHOWN])}; choose an empty folder or prefix. Nothing was changed"
        )
