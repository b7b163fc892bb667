"""`regen fit`: the table, the last line of JSON, and the exit status."""

import json
from pathlib import Path

import pytest

from flows.cli import run
from provisioning_helpers import write_model


@pytest.fixture
def config(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "model") / "config.json")


def fit(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object], str]:
    status = run(["fit", *arguments])
    out = capsys.readouterr().out
    return status, json.loads(out.splitlines()[-1]), out


def test_an_h200_runs_at_least_twice_the_defaults(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, result, out = fit(capsys, "--model-config", config, "--gpu-gib", "141", "--available-gib", "139.13")
    assert status == 0 and result["fits"] and result["max_running_requests"] >= 44
    assert "153,944,064 B" in out and "running requests" in out
    _, old, _ = fit(
        capsys, "--model-config", config, "--gpu-gib", "141", "--available-gib", "139.13", "--sglang", "0.5.11"
    )
    assert old["sglang_defaults"]["running_requests"] == 22  # type: ignore[index]


def test_json_alone(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, result, out = fit(capsys, "--model-config", config, "--gpu-gib", "96", "--available-gib", "94.5", "--json")
    assert status == 0 and len(out.splitlines()) == 1
    assert result["sglang"] == "0.5.17" and result["bytes"]["kv_per_token"] == 69_632  # type: ignore[index]


def test_exit_status_3_where_nothing_fits(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, result, out = fit(capsys, "--model-config", config, "--gpu-gib", "24")
    assert status == 3 and not result["fits"]
    assert "does not fit" in out


def test_exit_status_3_and_the_reason_without_mtp_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_model(tmp_path / "quantized", mtp=False) / "config.json")
    status, result, _ = fit(capsys, "--model-config", config, "--gpu-gib", "141")
    assert status == 3 and "mtp.*" in result["problems"][0]  # type: ignore[index]
    assert fit(capsys, "--model-config", config, "--gpu-gib", "141", "--no-mtp")[0] == 0


def test_mean_tokens_change_the_plan(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    short = fit(capsys, "--model-config", config, "--gpu-gib", "141", "--mean-tokens", "512")[1]
    long = fit(capsys, "--model-config", config, "--gpu-gib", "141", "--mean-tokens", "32768")[1]
    assert short["max_running_requests"] > long["max_running_requests"]  # type: ignore[operator]


def test_usage_errors_have_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "--gpu-gib", "96"]) == 2
    assert run(["fit", "--model-config", "/no/such/file", "--gpu-gib", "96"]) == 2
