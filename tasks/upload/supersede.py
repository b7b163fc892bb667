"""Regenerated prompts replace their old rows: the old parts are written again without them, never edited in place."""

import tempfile
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl

from tasks.storage import Store
from tasks.upload.chunk import put_proven
from tasks.upload.layout import to_entry
from tasks.upload.manifest import Manifest, active_parts
from tasks.upload.published import published_table


def replaced_ids(store: Store, ids: pl.DataFrame, run_id: str) -> set[str]:
    """Prompts completed now that older snapshots hold too. A prompt that failed now keeps its old row."""
    done = ids.filter(pl.col("outcome") == "completed").select("prompt_id")
    return set(published_table(store, without=run_id).join(done, on="prompt_id", how="semi")["prompt_id"])


def rewrite(store: Store, manifest: Manifest, ids: Collection[str], run_id: str) -> tuple[dict[str, Any], list[str]]:
    """New parts without the rows of `ids`, and the ids of the old parts that they replace."""
    added: dict[str, Any] = {}
    dropped: list[str] = []
    for old in active_parts(manifest):
        part = manifest["parts"][old]
        if part["run_id"] == run_id or not ids:
            continue
        with tempfile.TemporaryDirectory() as folder:
            files = _without(store, part, ids, run_id, Path(folder))
        if files is not None:
            name = f"{run_id}/from-{old.replace('/', '-')}"
            added[name] = {**part, "run_id": run_id, "rewritten_from": old, "files": files}
            dropped.append(old)
    return added, dropped


def _without(store: Store, part: Any, ids: Collection[str], run_id: str, folder: Path) -> list[dict[str, Any]] | None:
    """The part's files without `ids`; None where it holds none of them. Files without prompt ids stay as they are."""
    wanted, files, changed = pl.Series(list(ids), dtype=pl.String), [], False
    for value in part["files"]:
        entry = to_entry(value)
        if not entry.key.endswith(".parquet"):
            files.append(value)
            continue
        path = folder / Path(entry.key).name
        store.download(entry.key, path)
        hit = pl.col("prompt_id").is_in(wanted.implode())
        if not pl.scan_parquet(path).select(hit.any()).collect().item():
            files.append(value)
            continue
        kept = path.with_name(f"kept-{path.name}")
        pl.scan_parquet(path).filter(~hit).sink_parquet(kept, compression="zstd")
        key = f"runs/{run_id}/rewritten/{part['run_id']}-{part['index']:05d}/{path.name}"
        files.append(asdict(put_proven(store, key, kept, entry.kind)))
        changed = True
    return files if changed else None
