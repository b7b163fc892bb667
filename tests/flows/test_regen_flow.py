"""The whole regen flow in a Prefect server, on simulated SGLang servers that think and speculate (attach mode).

The simulator's tokens are those of the real tokenizer, so that masks, render parity and the manifest are real; what it
says of speed is simulated.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from flows.regen import regen
from flows.spec import RegenSpec
from simulator import Fault, SimFleet, SimSettings, TargetCodec
from targets import qwen36
from tasks.errors import DatasetError, GateError, SpecError
from tasks.upload.verify import verify

TIMING = {"calibration": {"start": 2, "limit": 8, "window_s": 0.3, "max_window_s": 3.0}, "budget": {}}
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", autouse=True)
def prefect_server() -> Iterator[None]:
    with (
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
        prefect_test_harness(server_startup_timeout=120),
    ):
        yield


@pytest.fixture
def fleet() -> Iterator[SimFleet]:
    settings = SimSettings(median_tokens=60, sigma=0.5, speedup=50, max_running=16)
    with SimFleet(2, settings, codec=TargetCodec(qwen36())) as fleet:
        yield fleet


def write_prompts(folder: Path, first: int, count: int) -> None:
    folder.mkdir(exist_ok=True)
    rows = [
        {"prompt": f"What is special about the number {i}? Explain it in a few sentences."}
        for i in range(first, first + count)
    ]
    (folder / f"{first}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec(tmp_path: Path, urls: list[str], **groups: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a run as regen/qwen36 has them, small."""
    directory = str(qwen36().directory)
    base: dict[str, Any] = {
        "source": {"paths": [str(tmp_path / "prompts" / "*.jsonl")]},
        "target": {"model": "simulated-qwen3.6", "tokenizer": directory, "mtp": True},
        "sampling": {"temperature": 1.0, "max_tokens": 4096},
        "serving": {"mode": "attach", "urls": urls},
        "generation": {"chunk_rows": 20, "ramp_s": 0, "retry_base_s": 0.05, "probe_s": 0.3, "no_server_s": 20},
        "publish": {"dataset": "set", "work_dir": str(tmp_path / "out"), "lease_s": 30},
        **TIMING,
    }
    merged = {name: {**base.get(name, {}), **groups.get(name, {})} for name in {*base, *groups}}
    loaded = RegenSpec.model_validate(merged)
    return {name: getattr(loaded, name) for name in RegenSpec.model_fields}


def published(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "set" / "manifest.json").read_text())  # type: ignore[no-any-return]


def published_ids(tmp_path: Path) -> list[str]:
    root = tmp_path / "out" / "set"
    keys = published(tmp_path)["current"]["files"]["completions"]
    return [i for key in keys for i in pl.read_parquet(root / key, columns=["prompt_id"])["prompt_id"]]


async def test_a_run_publishes_a_rerun_does_nothing_and_new_prompts_make_a_new_snapshot(
    tmp_path: Path, fleet: SimFleet
) -> None:
    write_prompts(tmp_path / "prompts", 0, 50)
    urls = [server.base_url for server in fleet.records()]
    first = await regen(**spec(tmp_path, urls))
    assert (first["rows"], first["kept"], first["done"], first["failed"]) == (50, 50, 50, 0)
    gates = json.loads((Path(first["run_dir"]) / "record.json").read_text())["gates"]
    assert gates["mtp"]["verdict"] == "ON_AND_EFFECTIVE" and gates["thinking"]["level"] == "ok", gates
    rows = pl.read_parquet(list((tmp_path / "out" / "set").glob("runs/*/chunks/*/tokens.parquet")))
    assert rows["ids_exact"].all() and (rows["loss_mask"].list.sum() == rows["n_supervised"]).all()
    assert verify(tmp_path / "out" / "set").verdict == "VERIFIED" or not verify(tmp_path / "out" / "set").differences

    asked = sum(fleet.servers[i].requests for i in range(2))
    again = await regen(**spec(tmp_path, urls))
    assert (again["completed"], again["done"], again["snapshot"]) == (0, 50, None)
    assert sum(fleet.servers[i].requests for i in range(2)) == asked, "nothing new must not reach a server"

    write_prompts(tmp_path / "prompts", 1000, 10)
    third = await regen(**spec(tmp_path, urls))
    assert (third["completed"], third["done"], third["kept"]) == (10, 60, 60)
    manifest = published(tmp_path)
    assert len(manifest["snapshots"]) == 2
    ids = published_ids(tmp_path)
    assert len(ids) == len(set(ids)) == 60

    async with get_client() as client:
        keys = {a.key for a in await client.read_artifacts()}
        names = {r.name for r in await client.read_flow_runs()}
    assert {"progress", "validation-reasons", "calibration", "gate-mtp", "report", "published", "lineage"} <= keys, keys
    assert any("set · simulated-qwen3.6" in name for name in names), names


async def test_a_server_lost_for_good_does_not_end_the_run(tmp_path: Path, fleet: SimFleet) -> None:
    write_prompts(tmp_path / "prompts", 0, 60)
    urls = [server.base_url for server in fleet.records()]
    fleet.inject(1, Fault("crash", after_requests=20))  # in mid-generation: its canaries take fewer
    done = await regen(**spec(tmp_path, urls))
    assert done["done"] == 60
    ids = published_ids(tmp_path)
    assert len(ids) == len(set(ids)) == 60


async def test_speculation_that_is_off_stops_the_run_before_any_work(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts", 0, 20)
    plain = SimSettings(median_tokens=60, speedup=50, accept_length=None)
    with SimFleet(1, plain, codec=TargetCodec(qwen36())) as fleet:
        urls = [server.base_url for server in fleet.records()]
        with pytest.raises(GateError, match="OFF"):
            await regen(**spec(tmp_path, urls))
        assert not (tmp_path / "out" / "set" / "manifest.json").exists()
        monitored = await regen(**spec(tmp_path, urls, serving={"mtp": {"gate": "monitor"}}, power={"gate": "monitor"}))
    assert monitored["done"] == 20 and monitored["adopted"]


async def test_another_identity_is_refused_with_the_field_that_differs(tmp_path: Path, fleet: SimFleet) -> None:
    write_prompts(tmp_path / "prompts", 0, 10)
    urls = [server.base_url for server in fleet.records()]
    await regen(**spec(tmp_path, urls))
    runs = sorted((tmp_path / "out" / "set" / "runs").iterdir())
    with pytest.raises(SpecError, match="temperature"):
        await regen(**spec(tmp_path, urls, sampling={"temperature": 0.6}))
    assert sorted((tmp_path / "out" / "set" / "runs").iterdir()) == runs, "a refused run must leave no folder"


async def test_prompts_that_are_all_unusable_end_with_their_reasons(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "bad.jsonl").write_text(
        '{"messages": []}\n{"messages": [{"role": "user", "content": ""}]}\n'
    )
    with pytest.raises((GateError, DatasetError), match=r"EMPTY_USER_TURN|NO_MESSAGES"):
        await regen(**spec(tmp_path, ["http://127.0.0.1:9"]))
