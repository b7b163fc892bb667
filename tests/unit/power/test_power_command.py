"""`regen power` on a machine with and without NVIDIA, and the pictures."""

import io
import json

import pytest
from rich.console import Console

from flows.cli import run
from flows.commands import power as command
from power_fakes import UUID, FakeLibrary, FakeSensor, info
from tasks.power import nvml
from tasks.power.plot import Mark, gate_picture, power_png, power_svg, thinned
from tasks.records import GateReport, Level, PowerSample


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.fixture
def nvidia(monkeypatch):
    library = FakeLibrary()
    monkeypatch.setattr(nvml, "open_nvml", lambda: nvml.Nvml(library, 1))
    return library


@pytest.mark.parametrize("arguments", [[], ["--once"], ["--json"], ["--once", "--json"]])
def test_without_nvidia_it_says_so_and_exits_0(arguments, capsys, monkeypatch):
    monkeypatch.setattr(nvml, "open_nvml", lambda: None)
    assert run(["power", *arguments]) == 0
    assert last_line(capsys)["verdict"] == "UNKNOWN"


def test_once_prints_a_table_and_the_reading(nvidia, capsys):
    assert run(["power", "--once"]) == 0
    out = capsys.readouterr().out
    payload = json.loads(out.strip().splitlines()[-1])
    assert payload["verdict"] == "READ"
    assert payload["power_w"] == 495.0
    gpu = payload["gpus"][0]
    assert gpu["enforced_limit_w"] == 700.0
    assert gpu["fraction_of_enforced_limit"] == pytest.approx(0.707, abs=0.001)
    assert gpu["limited_by"] == ["SW_POWER_CAP"]
    assert gpu["sm"] == pytest.approx(0.83)
    assert "NVIDIA" in out


def test_json_streams_one_line_a_reading(nvidia, capsys):
    assert run(["power", "--json", "--every", "0.2", "--seconds", "0.5"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.strip().splitlines()]
    assert len(lines) >= 3
    assert all("time_s" in line for line in lines[:-1])


def test_a_limit_below_the_default_is_shown():
    rows = command.snapshot(FakeSensor(infos=[info(enforced_limit_w=450.0)]))
    assert command.summary(rows)["verdict"] == "LIMIT_CHANGED"
    out = io.StringIO()
    Console(file=out, width=140).print(command.table(rows))
    assert "450 W*" in out.getvalue()


def test_the_live_table_follows_until_its_time_is_over(nvidia, capsys):
    sensor = nvml.open_nvml()
    rows = command._follow(sensor, command.snapshot(sensor), False, 0.2, 0.5)
    assert rows[0]["power_w"] == 495.0
    assert "495 W" in capsys.readouterr().out


def test_a_mig_device_is_unknown():
    rows = command.snapshot(FakeSensor(infos=[info(mig=True)]))
    assert command.summary(rows)["verdict"] == "UNKNOWN"


def readings(count: int) -> list[PowerSample]:
    return [
        PowerSample(
            time_s=1.7e9 + i / 5,
            gpu_uuid=UUID,
            power_average_w=400.0 + i % 50,
            enforced_limit_w=600.0,
            default_limit_w=700.0,
        )
        for i in range(count)
    ]


def test_a_picture_with_limits_windows_and_marks():
    png = power_png(readings(300), windows={"s0": [1.7e9 + 10, 1.7e9 + 40]}, marks=[Mark(1.7e9 + 40, "HEALTHY")])
    assert png.startswith(b"\x89PNG")
    svg = power_svg(readings(300), marks=[Mark(1.7e9 + 40, "s0: HEALTHY")])
    assert "enforced limit 600 W" in svg
    assert "default limit 700 W" in svg
    assert "s0: HEALTHY" in svg


def test_no_readings_no_picture():
    assert power_png([]) == b""
    assert power_svg([PowerSample(time_s=1.0, gpu_uuid=UUID)]) == ""


def test_long_runs_are_thinned():
    assert len(thinned(readings(20_000), most=500)) <= 501


def test_a_gates_picture():
    report = GateReport(
        "power_baseline",
        "HEALTHY",
        Level.OK,
        "enforce",
        "fine",
        details={"windows": {"s0": [1.7e9 + 10, 1.7e9 + 40]}, "servers": {"s0": {"verdict": "HEALTHY"}}},
    )
    assert gate_picture(report, readings(300)).startswith(b"\x89PNG")
