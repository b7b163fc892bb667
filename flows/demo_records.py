"""Keep what the local Prefect server shows true: runs that nobody works on any more, and records still on their way."""

import asyncio
import time
from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Crashed

LIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


async def live_runs(client: PrefectClient, tag: str) -> list[FlowRun]:
    """Flow runs with this tag that the server thinks are being worked on."""
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=LIVE))
    return await client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag]), state=state))


def _live_tasks() -> TaskRunFilter:
    return TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=LIVE)))


async def close_lost_runs(tag: str) -> int:
    """Mark runs that a killed process left RUNNING as CRASHED; returns how many.

    Only for a server whose runs with this tag belong to one process at a time, which holds a lock: nobody else can be
    working on them. Without it they would be shown as running for ever.
    """
    lost: State[Any] = Crashed(message="Its process was killed; the same command went on with the same run folder.")
    async with get_client() as client:
        runs = await live_runs(client, tag)
        for run in runs:
            only = FlowRunFilter(id={"any_": [run.id]})  # type: ignore[arg-type]
            for task in await client.read_task_runs(flow_run_filter=only, task_run_filter=_live_tasks()):
                await client.set_task_run_state(task.id, lost, force=True)
            await client.set_flow_run_state(run.id, lost, force=True)
    return len(runs)


async def wait_for_records(tag: str, timeout_s: float = 6.0) -> bool:
    """Wait until the server has recorded the end of every task run; it does so some time after the fact."""
    deadline = time.monotonic() + timeout_s
    only = FlowRunFilter(tags=FlowRunFilterTags(all_=[tag]))
    async with get_client() as client:
        while await client.read_task_runs(flow_run_filter=only, task_run_filter=_live_tasks(), limit=1):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.25)
    return True
