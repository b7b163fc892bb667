"""The deployment flow `validate`: the same judgement, with its artifacts, and a gate that fails the run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect import get_client
from prefect.testing.utilities import prefect_test_harness

from flows.validate import validate
from tasks.errors import GateError
from tasks.validation.settings import SourceSettings


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    """A Prefect server of its own, with an empty database."""
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("server")
async def test_the_flow_shows_what_it_found_and_fails_at_the_gate(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    ids = [[i, 1, 2, 3] for i in range(10)]
    pq.write_table(pa.table({"input_ids": ids, "loss_mask": [[0, 1, 1, 1]] * 10}), path)
    options: dict[str, Any] = {"out_dir": str(tmp_path / "out")}
    found = await validate(SourceSettings(paths=(str(path),), min_content_tokens=3), **options)
    assert (found["rows"], found["kept"], found["verdict"]) == (10, 10, "PASSED")
    with pytest.raises(GateError, match="NOTHING_USABLE"):
        await validate(SourceSettings(paths=(str(path),)), **options)
    monitored = await validate(SourceSettings(paths=(str(path),), gate="monitor"), **options)
    assert monitored["reasons"] == {"TOO_FEW_SUPERVISED_TOKENS": 10}
    async with get_client() as client:
        artifacts = await client.read_artifacts()
    keys = {artifact.key for artifact in artifacts}
    assert {"validation-reasons", "validation-examples", "validation-histogram", "gate-validation"} <= keys
