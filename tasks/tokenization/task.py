"""Tokenization as a Prefect task: one chunk a task run, in processes of its own, and what a person sees of it."""

import asyncio
from datetime import timedelta
from pathlib import Path

from prefect import task

from tasks.records import ChunkRecord, TokenRecord
from tasks.settings import SamplingSettings
from tasks.target.text import TargetText
from tasks.tokenization.gate import check_chunk
from tasks.tokenization.run import tokenize_chunk
from tasks.tokenization.settings import TokenizationSettings
from tasks.ui import task as ui


# One retry: a worker process killed for memory is the only transient failure. The file is reused when it is whole, so
# nothing needs to be persisted.
@task(
    name="tokenize",
    task_run_name="tokenize-{chunk.index:05d}",
    retries=1,
    retry_delay_seconds=10,
    timeout_seconds=timedelta(hours=4).total_seconds(),
    persist_result=False,
)
async def tokenize(
    chunk: ChunkRecord, target: TargetText, settings: TokenizationSettings, sampling: SamplingSettings
) -> TokenRecord:
    """Tokenize one finished chunk beside its completions. Raises GateError when nothing of it became a row."""
    completions = Path(chunk.completions_path)
    record = await asyncio.to_thread(
        tokenize_chunk,
        completions,
        completions.with_name("tokens.parquet"),
        target,
        settings,
        sampling,
        index=chunk.index,
    )
    show(record)
    check_chunk(record)
    return record


def show(record: TokenRecord) -> None:
    """A table of what became of the chunk's answers; only where something was rejected."""
    if not record.reasons:
        return
    rows = [{"outcome": "row", "reason": "", "answers": record.rows}]
    rows += [{"outcome": "rejected", "reason": reason, "answers": n} for reason, n in sorted(record.reasons.items())]
    ui.table(
        f"tokens-{record.index:05d}", rows, f"{record.rejected:,} of {record.rows + record.rejected:,} answers rejected"
    )
