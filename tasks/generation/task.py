"""Generation in Prefect: one task run a chunk. A retry asks only for what is missing."""

import asyncio
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from tasks.errors import GateError, ServerError, SpecError
from tasks.generation.engine import Engine, EngineStopped
from tasks.records import ChunkRecord
from tasks.ui import task as ui

NO_RETRY = (GateError, EngineStopped, SpecError)


async def _worth_retrying(_task: Any, _run: Any, state: Any) -> bool:
    """A gate's no, a stop and a refused spec are answers; a full disk or a lost fleet may pass."""
    result = await state.aresult(raise_on_failure=False)  # `result` is a coroutine here, and never one of NO_RETRY
    return not isinstance(result, NO_RETRY)


@task(
    name="generate-chunk",
    task_run_name="generate-{index:05d}",
    retries=2,
    retry_delay_seconds=[10, 60],
    retry_condition_fn=_worth_retrying,
    persist_result=False,
    cache_policy=NO_CACHE,
)
async def generate_chunk(engine: Engine, index: int) -> ChunkRecord:
    """Wait for chunk `index` of a started engine. Raises what `Engine.wait_chunk` raises.

    The engine works on chunks by itself; this task is the label, the retry and the row in the UI.
    """
    if (task_run.run_count or 1) > 1:
        engine.retry_chunk(index)
    try:
        record = await engine.wait_chunk(index)
    except (GateError, ServerError) as error:
        report = engine.report()
        if report is not None and isinstance(error, GateError):
            await asyncio.to_thread(ui.gate, report)
        raise
    if record.failed:
        rows = [{"reason": reason, "prompts": count} for reason, count in sorted(record.failed_reasons.items())]
        await asyncio.to_thread(ui.table, f"failed-{index:05d}", rows, f"{record.failed} of {record.prompts} prompts")
    return record
