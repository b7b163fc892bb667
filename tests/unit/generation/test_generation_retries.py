"""Which errors of a chunk are tried again: what may pass, never what somebody decided."""

import pytest
from prefect.states import Failed

from tasks.errors import GateError, SpecError, StorageError
from tasks.generation.engine import EngineStopped
from tasks.generation.task import generate_chunk


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (GateError("the window is over the budget"), False),
        (EngineStopped("cancelled"), False),
        (SpecError("another spec"), False),
        (StorageError("disk full"), True),
    ],
)
async def test_a_decision_is_not_retried(error: Exception, again: bool) -> None:
    asked = generate_chunk.retry_condition_fn
    assert asked is not None
    assert await asked(generate_chunk, None, Failed(data=error)) is again  # type: ignore[arg-type, misc]
