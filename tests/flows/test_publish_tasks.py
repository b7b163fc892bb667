"""Upload, publish and report as Prefect runs them: artifacts, lineage events and small results."""

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from published_runs import make_chunk, make_run
from tasks.report.task import write_report
from tasks.storage import open_store
from tasks.upload.lease import hold_lease
from tasks.upload.lineage import asset_uri, steps
from tasks.upload.task import publish, upload_chunk


@pytest.fixture(scope="module")
def prefect_server():
    with (
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
        prefect_test_harness(server_startup_timeout=120),
    ):
        yield


@pytest.mark.timeout(300)
async def test_a_run_is_published_with_lineage_and_report(prefect_server, tmp_path):
    store = open_store(tmp_path / "store")
    paths = make_run(tmp_path / "work" / "set", "run1")

    @flow(persist_result=False)
    async def mission():
        sent = [await upload_chunk(store, "run1", make_chunk(paths, i, [10 * i, 10 * i + 1])) for i in range(2)]
        await write_report(paths)
        with hold_lease(store, "test", 60) as lease:
            return await publish(store, paths, sent, {}, "set", lease)

    made = await mission()
    assert made["rows"]["tokens"] == 4
    assert made["manifest"].endswith("/manifest.json")
    assert store.exists("runs/run1/report.html")
    async with get_client() as client:
        artifacts = {a.key: a for a in await client.read_artifacts()}
        runs = [r.name for r in await client.read_task_runs()]
    assert "| answered | 4" in artifacts["report"].data
    for name in ("prompts", "completions", "tokens", "published"):
        assert name in artifacts["lineage"].data
    assert {"upload chunk 0", "upload chunk 1"} <= set(runs)


def test_lineage_is_a_chain_of_valid_asset_keys(tmp_path):
    from prefect.assets import Asset

    manifest = {"snapshots": [], "current": {}}
    for url in (str(tmp_path / "a folder"), "s3://bucket/set"):
        chain = steps(url, "run1", manifest)
        assert [step.name for step in chain] == ["prompts", "completions", "tokens", "published"]
        for step, before in zip(chain[1:], chain, strict=False):
            assert step.made_from == (before.key,)
        for step in chain:
            assert Asset(key=step.key).key == step.key
    assert asset_uri("/a b", "c") == "file:///a_b/c"
