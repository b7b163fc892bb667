"""In Prefect: tasks with their artifacts, and a person who approves (or not) a run over its budget."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import flow, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.flow_runs import apause_flow_run
from prefect.testing.utilities import prefect_test_harness

from calibration_curves import Curve, CurveDriver, saturating
from flows.approval import approved
from flows.calibrate import calibrate
from flows.mtp_steps import with_steps
from flows.spec import RegenSpec
from simulator import SimFleet, SimSettings
from simulator.codec import TargetCodec
from targets import qwen36
from tasks.calibration.forecast import Rates
from tasks.calibration.settings import BudgetSettings, CalibrationSettings
from tasks.calibration.task import calibrate_servers, forecast_gate
from tasks.errors import GateError
from tasks.generation.plan import ledger
from tasks.records import GateReport, Progress
from tasks.runs import RunPaths

BUDGET = BudgetSettings(deadline_h=0.01, over_budget="approve")
PROGRESS = Progress(10_000, 300, 0, 64, 300_000, 100.0, 4000.0)


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    """A Prefect server of its own, with an empty database."""
    with prefect_test_harness(server_startup_timeout=120):
        yield


@flow(name="over-budget", persist_result=False)
async def over_budget(path: str) -> GateReport:
    lengths = ([1000.0] * 300, [100.0] * 64)
    report = await forecast_gate(PROGRESS, lengths, Rates(4000.0, 64), 4096, BUDGET, Path(path))
    return await approved(report, BUDGET)


async def answer(run_name: str, /, **form: object) -> None:
    """What a person does in the UI: wait for the paused run, fill in the form, press Resume."""
    async with get_client() as client:
        for _ in range(200):
            runs = await client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[run_name])))
            if runs and runs[0].state and runs[0].state.is_paused():
                result = await client.resume_flow_run(runs[0].id, run_input=form)
                assert result.status.value == "ACCEPT", result
                return
            await asyncio.sleep(0.2)
    raise AssertionError(f"{run_name} was never paused")


@pytest.mark.slow
@pytest.mark.usefixtures("server")
async def test_a_person_decides_in_the_ui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def soon(**options: object) -> object:
        return await apause_flow_run(**options, poll_interval=1)  # type: ignore[arg-type]

    monkeypatch.setattr("flows.approval.apause_flow_run", soon)
    run = over_budget.with_options(flow_run_name="approve-me")
    report, _ = await asyncio.gather(
        run(str(tmp_path / "f.json")), answer("approve-me", approve=True, name="Ada", reason="go")
    )
    assert (report.verdict, report.stops) == ("APPROVED", False)
    assert report.details["approval"]["name"] == "Ada"
    run = over_budget.with_options(flow_run_name="refuse-me")
    report, _ = await asyncio.gather(run(str(tmp_path / "g.json")), answer("refuse-me", approve=False))
    assert report.stops


@pytest.mark.slow
@pytest.mark.usefixtures("server")
async def test_nobody_answers_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def short(**options: object) -> object:
        return await apause_flow_run(**{**options, "timeout": 1}, poll_interval=1)  # type: ignore[arg-type]

    monkeypatch.setattr("flows.approval.apause_flow_run", short)
    with pytest.raises(GateError, match="Nobody approved within"):
        await over_budget(str(tmp_path / "f.json"))


@pytest.mark.slow
@pytest.mark.usefixtures("server")
async def test_artifacts_of_calibration(tmp_path: Path) -> None:
    @flow(name="measure", persist_result=False)
    async def measure() -> dict[str, int]:
        driver = CurveDriver({"a": Curve("x", saturating())})
        found = await calibrate_servers(driver, CalibrationSettings(limit=64), "k", tmp_path, pending=lambda: 10_000)
        return dict(found.limits)

    assert (await measure())["a"] == 64
    async with get_client() as client:
        keys = {artifact.key for artifact in await client.read_artifacts()}
    assert {"calibration", "calibration-plot"} <= keys


def test_other_draft_steps_are_the_same_data() -> None:
    spec = RegenSpec(source={"paths": ["x"]}, target={"model": "m"}, publish={"dataset": "d"})  # type: ignore[arg-type]
    five, off = with_steps(spec, 5), with_steps(spec, 0)
    assert (five.serving.mtp.steps, five.serving.mtp.draft_tokens, five.target.mtp) == (5, 6, True)
    assert not off.target.mtp
    assert spec.identity_digest() == five.identity_digest() == off.identity_digest()


@pytest.mark.slow
@pytest.mark.usefixtures("server")
async def test_the_calibrate_flow_on_simulated_servers(tmp_path: Path) -> None:
    """The deployment's flow from prompts to limits; a later run of the same spec finds its answers in the journal."""
    target = qwen36()
    path = tmp_path / "prompts.jsonl"
    rows = ({"messages": [{"role": "user", "content": f"Tell me about the number {i}."}]} for i in range(2000))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    simulated = SimSettings(max_running=12, saturation=6, speedup=8, median_tokens=60, sigma=0.5)
    with SimFleet(2, simulated, codec=TargetCodec(target)) as fleet:
        serving = {"mode": "attach", "urls": [s.base_url for s in fleet.records()], "thinking_gate": "monitor"}
        spec = RegenSpec.model_validate(
            {
                "source": {"paths": [str(path)]},
                "target": {"model": str(target.directory), "mtp": False},
                "publish": {"dataset": "calibrated", "work_dir": str(tmp_path / "out")},
                "sampling": {"max_tokens": 512},
                "serving": serving,
                "calibration": {"start": 2, "limit": 32, "window_s": 0.8, "max_window_s": 6},
            }
        )
        found = await calibrate(**{name: getattr(spec, name) for name in RegenSpec.model_fields})
    assert all(4 <= limit <= 12 for limit in found["limits"].values()) and len(found["limits"]) == 2
    run_dir = tmp_path / "out" / "calibrated" / "runs" / found["run_id"]
    assert json.loads((run_dir / "calibration.json").read_text())["limits"] == found["limits"]
    assert json.loads((run_dir / "forecast.json").read_text())["forecasts"][0]["remaining_prompts"] > 0
    assert (tmp_path / "out" / "calibrated" / "current").read_text().strip() == found["run_id"]
    assert len(ledger(RunPaths(tmp_path / "out" / "calibrated", found["run_id"])).done) > 10
