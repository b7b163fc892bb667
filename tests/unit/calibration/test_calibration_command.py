"""`regen calibrate`: usage, refusals, and a whole calibration of SIMULATED servers."""

import json
from pathlib import Path

import pytest

from flows.cli import run
from simulator import SimFleet, SimSettings
from simulator.codec import TargetCodec
from targets import chatml_target, qwen36


def last_line(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


def write_prompts(path: Path, count: int) -> Path:
    rows = ({"messages": [{"role": "user", "content": f"Tell me about the number {i}."}]} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_help_names_an_example(capsys):
    assert run(["calibrate", "--help"]) == 0
    assert "Example: regen calibrate --url" in capsys.readouterr().out


def test_a_url_is_needed(capsys):
    assert run(["calibrate", "--target", "x", "--prompts", "y"]) == 2
    assert "--url" in last_line(capsys.readouterr().out)["error"]


def test_a_server_that_is_not_there_is_infrastructure(capsys, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 5)
    arguments = ["--url", "http://127.0.0.1:9", "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    assert run(["calibrate", "--target", str(chatml_target().directory), *arguments]) == 4
    assert "127.0.0.1:9" in last_line(capsys.readouterr().out)["error"]


@pytest.mark.slow
def test_two_simulated_servers(capsys, tmp_path):
    target = qwen36()
    prompts = write_prompts(tmp_path / "prompts.jsonl", 3000)
    simulated = SimSettings(max_running=12, saturation=6, speedup=8, median_tokens=60, sigma=0.5)
    with SimFleet(2, simulated, codec=TargetCodec(target)) as fleet:
        urls = [part for server in fleet.records() for part in ("--url", server.base_url)]
        arguments = ["--prompts", str(prompts), "--out", str(tmp_path / "out"), "--window", "0.8", "--start", "2"]
        budget = ["--deadline-h", "0.0001"]
        status = run(
            ["calibrate", *urls, "--target", str(target.directory), *arguments, "--max-tokens", "512", *budget]
        )
    payload = last_line(capsys.readouterr().out)
    assert "error" not in payload, payload["error"]
    assert (status, payload["budget"]) == (3, "OVER_DEADLINE")
    assert all(4 <= limit <= 12 for limit in payload["limits"].values()) and len(payload["limits"]) == 2
    assert payload["tok_s"] > 0 and payload["answers"] > 0
    assert {Path(file).name for file in payload["files"]} == {"calibration.json", "calibration.png", "forecast.json"}
    assert all(Path(file).stat().st_size > 0 for file in payload["files"])
