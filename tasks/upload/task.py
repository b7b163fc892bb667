"""Upload as Prefect tasks: one task run a chunk, one for the manifest, and the lineage that a person follows."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import task
from prefect.assets import Asset, materialize
from prefect.cache_policies import NO_CACHE

from tasks.records import ChunkRecord, PublishedChunk
from tasks.runs import RunPaths
from tasks.storage import Store
from tasks.ui import task as ui
from tasks.upload import chunk, lineage, snapshot
from tasks.upload.lease import Lease

RETRY_DELAYS_S = [10.0, 60.0, 300.0]
"""Requests are retried for a minute inside; these bridge a store that is down for a few minutes."""


# The store is the truth: a repeated task finds what is there and sends only what is missing, so nothing is cached.
@task(
    name="upload",
    task_run_name="upload chunk {record.index}",
    retries=3,
    retry_delay_seconds=RETRY_DELAYS_S,
    timeout_seconds=6 * 3600,
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def upload_chunk(store: Store, run_id: str, record: ChunkRecord) -> PublishedChunk:
    """Send one finished chunk and prove from the store that it is there. Runs in a thread; parts survive a cancel."""
    return await asyncio.to_thread(chunk.upload_chunk, store, run_id, Path(record.directory), record)


@task(
    name="publish",
    retries=2,
    retry_delay_seconds=RETRY_DELAYS_S[:2],
    timeout_seconds=3600,
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def publish(
    store: Store,
    paths: RunPaths,
    chunks: Sequence[PublishedChunk],
    facts: Mapping[str, Any],
    dataset: str,
    lease: Lease | None = None,
) -> dict[str, Any]:
    """Write the manifest last, then show lineage; returns {manifest, snapshot, rows, bytes, files}."""
    manifest = await asyncio.to_thread(
        snapshot.publish_snapshot, store, paths, chunks, facts, dataset=dataset, lease=lease
    )
    steps = lineage.steps(store.url, paths.run_id, manifest)
    ui.table("lineage", [step.row() for step in steps], "Prompts → completions → tokens → published set")
    for step in steps:
        await _materialize(step)
    return lineage.summary(store.url, manifest)


async def _materialize(step: lineage.Step) -> None:
    """One asset event; the asset pages are Prefect Cloud's, the event is everywhere."""
    asset = Asset(key=step.key)
    made = materialize(asset, by="drafter-regen", name=f"asset {step.name}", asset_deps=list(step.made_from))

    async def record() -> None:
        asset.add_metadata(dict(step.figures))

    await made(record)()
