"""The end of a run: its chunks become a snapshot of the data set, older parts included by reference."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.errors import VerificationError
from tasks.records import FileEntry, PublishedChunk
from tasks.runs import RunPaths, read_json
from tasks.storage import Store
from tasks.upload.card import write_card
from tasks.upload.chunk import put_proven
from tasks.upload.counts import chunk_counts, total
from tasks.upload.ids import collect_ids
from tasks.upload.layout import IDS, RUN_FILES, part_id
from tasks.upload.lease import Lease
from tasks.upload.manifest import Manifest, read_manifest, update_manifest
from tasks.upload.provenance import provenance
from tasks.upload.supersede import replaced_ids, rewrite


def publish_snapshot(
    store: Store,
    paths: RunPaths,
    chunks: Sequence[PublishedChunk],
    facts: Mapping[str, Any] | None = None,
    *,
    dataset: str | None = None,
    lease: Lease | None = None,
) -> Manifest:
    """Publish `chunks` of the run as its snapshot and return the whole manifest; with no chunks nothing changes.

    Repeating it is harmless. Raises GateError for simulated acceptance, VerificationError for missing files,
    StorageError where the store refuses or the lease is lost.
    """
    name = dataset or paths.dataset_dir.name
    if not chunks:
        return read_manifest(store)[0] or update_manifest(store, name, lambda _: None)
    spec = read_json(paths.spec)
    known = (read_json(paths.record) if paths.record.exists() else {}) | dict(facts or {})
    made = provenance(spec, known)
    counts = {chunk.index: chunk_counts(paths.chunk(chunk.index)) for chunk in chunks}
    ids = collect_ids(paths, sorted(counts))
    with tempfile.TemporaryDirectory() as folder:
        ids.write_parquet(Path(folder) / IDS, compression="zstd")
        documents = [put_proven(store, f"runs/{paths.run_id}/{IDS}", Path(folder) / IDS, "ids")]
    documents += upload_documents(store, paths)
    parts = {part_id(paths.run_id, c.index): _part(paths, c, counts[c.index]) for c in chunks}
    snapshot = {
        "id": paths.run_id,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "adds": sorted(parts),
        "drops": [],
        "counts": total(counts.values()) | {"settled": ids.height},
        "documents": [asdict(entry) for entry in documents],
        **made,
    }
    replaced = replaced_ids(store, ids, paths.run_id)
    if lease is not None:
        lease.check()

    def change(manifest: Manifest) -> Manifest | None:
        return _with_snapshot(store, manifest, snapshot, parts, replaced)

    manifest = update_manifest(store, name, change)
    write_card(store, manifest)
    store.abandon_uploads(f"runs/{paths.run_id}/")
    return manifest


def upload_documents(store: Store, paths: RunPaths) -> list[FileEntry]:
    """Send what a reader wants beside the data: spec, rejects, calibration, power, report."""
    return [
        put_proven(store, f"runs/{paths.run_id}/{name}", paths.run_dir / name, kind)
        for name, kind in RUN_FILES.items()
        if (paths.run_dir / name).exists()
    ]


def _part(paths: RunPaths, chunk: PublishedChunk, counts: Mapping[str, Any]) -> dict[str, Any]:
    data = {entry.kind for entry in chunk.files}
    if not data & {"completions", "tokens", "failed"}:
        raise VerificationError(f"chunk {chunk.index} of {paths.run_id} was published without data: upload it again")
    files = [asdict(entry) for entry in chunk.files]
    return {"run_id": paths.run_id, "index": chunk.index, "files": files, "counts": dict(counts)}


def _with_snapshot(
    store: Store, manifest: Manifest, snapshot: dict[str, Any], parts: Mapping[str, Any], replaced: set[str]
) -> Manifest | None:
    run_id = snapshot["id"]
    if run_id in [s["id"] for s in manifest["snapshots"][:-1]]:
        return None  # later snapshots build on it already
    # A run that crashed after its manifest publishes again: its earlier snapshot gives way, its rewritten parts too.
    manifest["snapshots"] = [s for s in manifest["snapshots"] if s["id"] != run_id]
    manifest["parts"] = {n: p for n, p in manifest["parts"].items() if p["run_id"] != run_id}
    rewritten, dropped = rewrite(store, manifest, replaced, run_id)
    previous = manifest["snapshots"][-1]["id"] if manifest["snapshots"] else None
    manifest["parts"] |= rewritten | dict(parts)
    manifest["snapshots"].append(
        {**snapshot, "previous": previous, "drops": dropped, "adds": sorted([*rewritten, *snapshot["adds"]])}
    )
    return manifest
