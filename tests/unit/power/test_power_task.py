"""The Prefect side: what is shown, when the run stops, and how often a gate is tried."""

from dataclasses import replace

import pytest

from power_fakes import UUID, FakeSensor
from tasks.errors import GateError
from tasks.power import gate, task
from tasks.power.baseline import Baselines
from tasks.power.rig import Rig
from tasks.power.sampler import PowerSampler
from tasks.power.settings import PowerSettings
from tasks.records import GateReport, Level, Server

REPORT = GateReport("power_hard_rules", "HEALTHY", Level.OK, "enforce", "fine")


@pytest.fixture
def shown(monkeypatch):
    """What went to the UI, by kind."""
    seen: dict[str, list] = {"gate": [], "picture": [], "table": [], "event": []}
    for kind in seen:
        monkeypatch.setattr(task.ui, kind, lambda *arguments, kind=kind: seen[kind].append(arguments))
    return seen


@pytest.fixture
def rig():
    with PowerSampler(None, FakeSensor(), hz=20) as sampler:
        yield Rig([Server("s", "http://127.0.0.1:1", "m", gpu_uuids=(UUID,))], sampler, PowerSettings())


def answer(report: GateReport):
    async def gated(*_: object, **__: object) -> GateReport:
        return report

    return gated


async def test_a_passing_gate_shows_itself_and_its_picture(shown, rig, monkeypatch):
    import time

    time.sleep(0.3)
    now_s = time.time()
    windows = {"windows": {"s": [now_s - 0.3, now_s]}, "servers": {"s": {"verdict": "HEALTHY"}}}
    monkeypatch.setattr(gate, "hard_rules", answer(replace(REPORT, details=windows)))
    report = await task.hard_rules.fn(rig)
    assert report.verdict == "HEALTHY"
    assert len(shown["gate"]) == 1
    key, png, _ = shown["picture"][0]
    assert key == "watts-power-hard-rules"
    assert png.startswith(b"\x89PNG")


async def test_a_critical_gate_shows_itself_and_stops(shown, rig, monkeypatch, tmp_path):
    bad = replace(REPORT, verdict="HUNG_PARKED", level=Level.CRITICAL)
    monkeypatch.setattr(gate, "baseline_gate", answer(bad))
    with pytest.raises(GateError, match="HUNG_PARKED") as caught:
        await task.baseline_gate.fn(rig, {"s": 4}, Baselines(tmp_path))
    assert caught.value.report["stops"]
    assert len(shown["gate"]) == 1


async def test_a_monitoring_gate_goes_on(shown, rig, monkeypatch):
    monkeypatch.setattr(gate, "hard_rules", answer(replace(REPORT, level=Level.CRITICAL, mode="monitor")))
    assert (await task.hard_rules.fn(rig)).level is Level.CRITICAL


def test_gates_get_a_second_probe_and_are_never_cached():
    for gated in (task.hard_rules, task.baseline_gate):
        assert gated.retries == 1
        assert gated.persist_result is False


def test_a_live_change_is_an_event(shown):
    task.live_event(replace(REPORT, verdict="THERMAL_LIMITED", level=Level.WARNING))
    name, payload = shown["event"][0]
    assert (name, payload["verdict"], payload["level"]) == ("regen.power.live", "THERMAL_LIMITED", "warning")
