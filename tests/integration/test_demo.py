"""`regen demo` as a person uses it: once, again, interrupted, killed, with more prompts. One folder, in this order."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest

REGEN = Path(sys.executable).with_name("regen")
KEYS = {"run_id", "run_dir", "rows", "kept", "rejected", "duplicates", "completed", "done", "failed"}
KEYS |= {"output_tokens", "tok_s", "manifest", "files"}
FEW, MORE = 8, 30
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass
class Ended:
    status: int
    last: dict
    text: str
    errors: str


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


def begin(out, *options):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AWS_"))}
    return subprocess.Popen(
        [REGEN, "demo", "--out", str(out), *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean,
    )


def end(process):
    text, errors = process.communicate(timeout=300)
    lines = text.splitlines()
    return Ended(process.returncode, json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}, text, errors)


def demo(out, *options):
    return end(begin(out, *options))


def published(result, kind):
    """Rows of one kind in the newest snapshot, as its manifest names them."""
    manifest = Path(result["manifest"])
    keys = json.loads(manifest.read_text())["current"]["files"].get(kind, [])
    return pl.concat([pl.read_parquet(manifest.parent / key) for key in keys]) if keys else pl.DataFrame()


def processes(out):
    """Living processes, but this one, that have the folder in their command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(out).encode() in text:
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


def reports(out):
    """Lines of every run's progress.jsonl so far."""
    return [
        json.loads(line)
        for path in (out / "demo" / "runs").glob("*/progress.jsonl")
        for line in path.read_text().splitlines()
    ]


def wait_for_answers(process, out, before, least=3):
    """Until the running demo reports some answers of its own, and not yet all; `before`: reports when it began."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        news = [report for report in reports(out) if report not in before]
        if news and any(least <= report["done"] < report["total"] for report in news):
            return
        time.sleep(0.1)
    raise AssertionError("no answers in 240 s")


def test_a_few_prompts_become_a_published_set(out):
    ended = demo(out, "--limit", FEW)
    assert ended.status == 0, ended.errors
    result = ended.last
    assert set(result) >= KEYS
    assert result["rows"] == FEW == result["kept"] + result["rejected"] + result["duplicates"]
    assert (result["rejected"], result["duplicates"]) == (1, 1)
    assert result["done"] + result["failed"] == result["kept"] == result["completed"] + result["failed"]
    assert result["output_tokens"] > 100 and result["tok_s"] > 1
    assert "Prefect UI: http://127.0.0.1:" in ended.text
    assert "rows read" in ended.text
    rows = published(result, "completions")
    assert rows.height == result["done"]
    assert sum(rows["output_tokens"]) == result["output_tokens"]
    folder = Path(result["manifest"]).parent
    tokens = pl.scan_parquet([folder / f for f in result["files"] if f.endswith("tokens.parquet")]).collect()
    assert tokens.height == result["token_rows"]
    assert (folder / "README.md").is_file()
    assert tokens["n_supervised"].min() > 0
    assert processes(out) == []


def test_the_same_command_does_nothing_again(out):
    result = demo(out, "--limit", FEW).last
    assert (result["completed"], result["done"]) == (0, published(result, "completions").height)


@pytest.mark.parametrize(("signal_number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_demo_leaves_nothing_running(out, signal_number, status):
    before = reports(out)
    process = begin(out, "--limit", MORE)
    wait_for_answers(process, out, before)
    living = " ".join(processes(out))
    assert "weed" in living and "prefect server start" in living and "embedded_engine" in living
    process.send_signal(signal_number)
    ended = end(process)
    assert ended.status == status
    if status == 130:
        assert ended.last["kind"] == "interrupted"
    deadline = time.monotonic() + 30
    while processes(out) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes(out) == []


def test_the_same_command_goes_on_and_every_id_is_done_once(out):
    ended = demo(out, "--limit", MORE)
    assert ended.status == 0, ended.errors
    result = ended.last
    assert result["done"] + result["failed"] == result["kept"] > 20
    ids = published(result, "completions")["prompt_id"].to_list() + (
        published(result, "failed")["prompt_id"].to_list() if published(result, "failed").height else []
    )
    assert len(ids) == len(set(ids)) == result["kept"]
    assert result["completed"] < result["done"]


def test_a_set_in_which_every_row_is_rejected_publishes_nothing(tmp_path):
    prompts = tmp_path / "bad.jsonl"
    prompts.write_text('{"messages": []}\n{"messages": [{"role": "user", "content": ""}]}\n')
    ended = demo(tmp_path / "out", "--prompts", prompts)
    assert ended.status in (2, 3)
    assert "2 rows" in ended.last["error"]
    assert not list((tmp_path / "out").rglob("published/manifest.json"))
