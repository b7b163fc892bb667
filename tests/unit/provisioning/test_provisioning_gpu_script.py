"""tests/gpu/serving.py from end to end, with stand-ins for SGLang and nvidia-smi: it must not rot between GPU runs."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

from paths import REPOSITORY
from provisioning_helpers import write_interpreter, write_model

SERVE = {"serve": True}
OOM = (
    "Load weight begin. avail mem=139.13 GB\n"
    "Load weight end. elapsed=0 s, type=X, avail mem=138.9 GB, mem usage=0.2 GB.\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 62.00 GiB. "
    "GPU 0 has a total capacity of 139.80 GiB of which 13.00 GiB is free."
)


def test_every_section_runs_and_a_small_json_remains(tmp_path: Path) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\necho '0, GPU-smi-{os.getpid()}, 143771, 142469, NVIDIA H200'\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    plain = {"serve": True, "accept_length": None}
    python = write_interpreter(tmp_path / "env", [SERVE, SERVE, plain, {"log": OOM, "exit": -9}, SERVE])
    model = write_model(tmp_path / "model")
    write_model(tmp_path / "shape-qwen3.6-27b")
    out = tmp_path / "results" / "serving.json"
    command = [
        sys.executable,
        str(REPOSITORY / "tests" / "gpu" / "serving.py"),
        "--model",
        str(model),
        "--out",
        str(out),
    ]
    command += ["--python", str(python), "--sections", "mtp,plain,oom,plan27b,pair", "--budget-s", "300"]
    env = {**os.environ, "PATH": f"{smi.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=env, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == []
    result = json.loads(out.read_text())
    sections = result["sections"]
    assert sections["mtp"]["mtp"]["accept_length"] > 2.8
    assert sections["kill"]["noticed_s"] < 5 and sections["kill"]["back_s"] < 60
    assert [row["outcome"] for row in sections["oom"]["starts"]] == ["failed", "ready"]
    assert sections["oom"]["starts"][1]["mem_fraction"] < 0.55
    assert sections["plan27b"]["checks"]["ran at once"]["ok"]
    assert sections["pair"]["skipped"] == "one GPU"
    assert len(out.read_bytes()) < 20_000


def test_what_does_not_fit_into_the_budget_is_skipped(tmp_path: Path) -> None:
    out = tmp_path / "serving.json"
    command = [
        sys.executable,
        str(REPOSITORY / "tests" / "gpu" / "serving.py"),
        "--model",
        str(tmp_path),
        "--out",
        str(out),
    ]
    done = subprocess.run([*command, "--budget-s", "5"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert all("needed" in section["skipped"] for section in json.loads(out.read_text())["sections"].values())
