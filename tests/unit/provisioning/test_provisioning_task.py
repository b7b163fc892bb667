"""The tasks are one call each into this room; their artifacts are the reports."""

from pathlib import Path
from typing import Any

import pytest

from provisioning_helpers import fake_gpu, write_interpreter, write_model
from tasks.provisioning import task
from tasks.provisioning.mtp import Verdict
from tasks.provisioning.settings import ServingSettings
from tasks.runs import RunPaths
from tasks.settings import SamplingSettings, TargetSettings


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been shown in the UI."""
    calls: list[Any] = []
    monkeypatch.setattr(task.ui, "table", lambda key, rows, text="": calls.append((key, rows)))
    monkeypatch.setattr(task.ui, "gate", lambda report: calls.append((report.gate, report.verdict)))
    return calls


async def test_provision_then_both_gates(tmp_path: Path, shown: list[Any]) -> None:
    python = write_interpreter(tmp_path / "env", [{"serve": True}])
    serving = ServingSettings(python=str(python))
    target = TargetSettings(model=str(write_model(tmp_path / "model")))
    sampling = SamplingSettings(max_tokens=2048)
    paths = RunPaths(tmp_path / "data", "r1")
    fleet = await task.provision.fn(serving, target, paths, sampling, gpus=lambda: [fake_gpu()])
    with fleet:
        canary = await task.thinking_canary.fn(fleet.servers, None, sampling, serving)
        gate = await task.mtp_gate.fn(fleet, serving, target)
    assert (canary.verdict, gate.verdict) == ("THINKING", Verdict.ON_AND_EFFECTIVE)
    assert [key for key, _ in shown] == ["servers", "server-starts", "thinking", "mtp"]
    assert fleet.servers[0].api_key not in repr(shown)


def test_nothing_of_provisioning_is_persisted_or_cached() -> None:
    for one in (task.provision, task.thinking_canary, task.mtp_gate):
        assert one.persist_result is False and one.retries == 0
