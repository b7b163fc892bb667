#!/usr/bin/env python3
"""The whole job on a real GPU: real Prefect, real S3, real SGLang with MTP, from prompts to a verified data set.

    python tests/gpu/whole_job.py --model MODELS/tiny-qwen3.5-mtp --sglang-python sglang-env/bin/python --out DIR

Runs in this project's own environment (requirements.lock); `--sglang-python` names the interpreter of SGLang's. Each
run is `regen run JOB` in a process of its own. Sections:

healthy   a run from nothing is killed (SIGKILL) at a third of its prompts; the same command adopts it and publishes;
          every byte is verified in the store; the same command again finds nothing to do and starts no server;
          `regen export` writes the set for a trainer
incident  the same job against a server that was started without MTP although the job wants it: the gate must stop the
          run before the first prompt is answered (exit status 3), and say why

Last line: one JSON object; DIR/whole-job.json has the figures, DIR/report.html the report of the finished run. Exit
status 1 when a check failed. `--attach URL` uses a running server in `healthy` (to try this script without a GPU).
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from findings import WORDS, Findings
from flows.local_prefect import local_prefect
from sglang_process import Sglang
from tasks.provisioning.local_store import LocalStore, local_store

KEY = "whole-job-key"
REGEN = "import sys; from flows.cli import main; sys.exit(main())"
SHOWN = ("run_id", "rows", "kept", "completed", "done", "failed", "output_tokens", "tok_s", "snapshot", "error", "kind")


class Job(Findings):
    """One data set: where it lies, how it is run, and what was found about it."""

    def __init__(self, arguments: argparse.Namespace, store: LocalStore, prefect_env: dict[str, str]) -> None:
        super().__init__(arguments.out / "whole-job.json", prompts=arguments.prompts)
        self.args, self.store, self.work = arguments, store, arguments.out / "work"
        self.env = {**os.environ, **prefect_env, **store.environment(), "REGEN_API_KEY": KEY, "PYTHONUNBUFFERED": "1"}
        self.env["REGEN_STATE_DIR"] = str(self.work / "node")

    def write(self, dataset: str, serving: dict[str, Any]) -> Path:
        """The job file of `dataset`, and its prompts."""
        prompts = self.work / f"{dataset}.jsonl"
        rng = random.Random(7)
        rows = [{"prompt": f"{i} " + " ".join(rng.choices(WORDS.split(), k=40))} for i in range(self.args.prompts)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        target = {"model": str(self.args.model.resolve()), "mtp": True}
        if self.args.tokenizer:
            target["tokenizer"] = str(self.args.tokenizer.resolve())
        job = {
            "source": {"paths": [str(prompts)]},
            "target": target,
            "sampling": {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "max_tokens": 256, "thinking": True},
            "serving": serving,
            "power": {"gate": "enforce", "probe_s": 31, "probe_output_tokens": 128, "idle_s": 4},
            "calibration": {"start": 8, "limit": 128, "window_s": 5, "max_window_s": 15},
            "generation": {"chunk_rows": max(20, self.args.prompts // 8), "ramp_s": 1, "drop_repetition": False},
            "publish": {
                "dataset": dataset,
                "work_dir": str(self.work / "out"),
                "store": f"s3://{self.store.bucket}/{dataset}",
                "endpoint_url": self.store.endpoint_url,
                "region": self.store.region,
                "lease_s": 30,
            },
        }
        path = self.work / f"{dataset}.yaml"
        path.write_text(json.dumps(job, indent=1))  # JSON is YAML
        return path

    def start(self, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """`regen …` in a process group of its own, its output in a log."""
        with (self.work / f"{name}.out").open("wb") as out, (self.work / f"{name}.err").open("wb") as err:
            command = [sys.executable, "-c", REGEN, *arguments]
            return subprocess.Popen(command, env=self.env, stdout=out, stderr=err, start_new_session=True)

    def ended(self, name: str, process: "subprocess.Popen[bytes]", timeout_s: float) -> dict[str, Any]:
        """Exit status, last line and the end of what was said."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
        lines = (self.work / f"{name}.out").read_text(errors="replace").splitlines()
        said = (self.work / f"{name}.err").read_text(errors="replace").splitlines()
        try:
            last = json.loads(lines[-1])
        except (IndexError, ValueError):
            last = {"error": "\n".join(said[-30:])}
        return {"exit": process.returncode, "last": last, "said": said[-30:]}

    def run(self, name: str, *arguments: str, timeout_s: float = 300) -> dict[str, Any]:
        """One command from start to end."""
        began = time.monotonic()
        found = self.ended(name, self.start(name, *arguments), timeout_s)
        return {**found, "seconds": round(time.monotonic() - began, 1)}

    def status(self, dataset: str) -> dict[str, Any]:
        """What `regen status` says now."""
        last = self.run("status", "status", str(self.work / "out" / dataset), timeout_s=60)["last"]
        return dict(last)


def short(found: dict[str, Any]) -> dict[str, Any]:
    """The part of a run's outcome that is kept."""
    return {
        "exit": found["exit"],
        "seconds": found.get("seconds"),
        **{name: found["last"][name] for name in SHOWN if name in found["last"]},
    }


def killed_run(job: Job, path: Path) -> dict[str, Any]:
    """Start, wait for a third of the prompts, kill -9."""
    began = time.monotonic()
    process = job.start("first", "run", str(path))
    done = 0
    while process.poll() is None and time.monotonic() - began < job.args.limit_s:
        time.sleep(1.0)
        done = int(job.status("whole").get("done") or 0)
        if done >= job.args.prompts // 3:
            break
    alive = process.poll() is None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return {"done": done, "alive": alive, "seconds": round(time.monotonic() - began, 1)}


def record_of(job: Job, dataset: str, run_id: str) -> dict[str, Any]:
    """Gates, calibration and forecast of a run, as it kept them."""
    folder = job.work / "out" / dataset / "runs" / run_id
    found: dict[str, Any] = {}
    for name in ("record", "calibration", "forecast"):
        with contextlib.suppress(OSError, ValueError):
            found[name] = json.loads((folder / f"{name}.json").read_text())
    with contextlib.suppress(OSError):
        shutil.copy(folder / "report.html", job.args.out / "report.html")
    gates = (found.get("record") or {}).get("gates") or {}
    short_gates = {n: {k: g.get(k) for k in ("verdict", "level", "summary")} for n, g in gates.items()}
    return {"gates": short_gates, "calibration": found.get("calibration"), "forecast": found.get("forecast")}


def healthy(job: Job) -> None:
    """Kill, resume, verify, nothing to do."""
    serving: dict[str, Any] = {"mode": "process", "python": str(job.args.sglang_python), "slots": 128}
    serving |= {"context_tokens": 2048, "extra_args": ["--disable-prefill-cuda-graph"]}
    if job.args.attach:
        serving = {"mode": "attach", "urls": [job.args.attach]}
    path = job.write("whole", serving)
    killed = killed_run(job, path)
    job.save(killed=killed)
    job.check("killed in mid-run", killed["alive"] and 0 < killed["done"] < job.args.prompts, killed)
    second = job.run("second", "run", str(path), timeout_s=job.args.limit_s)
    job.save(resumed=short(second))
    failed = second["last"].get("failed", 0) if job.args.attach else 0  # a simulator's answers may be too long
    good = second["exit"] == 0 and second["last"].get("done", 0) + failed == job.args.prompts
    job.check("resumed to the end", good, short(second) if good else second)
    if "run_id" in second["last"]:
        job.save(**record_of(job, "whole", second["last"]["run_id"]))
    url = f"s3://{job.store.bucket}/whole"
    env = {"AWS_ENDPOINT_URL": job.store.endpoint_url}
    job.env |= env
    verified = job.run("verify", "verify", url, timeout_s=120)
    job.check("every byte verified in the store", verified["exit"] == 0, verified["last"])
    third = job.run("third", "run", str(path), timeout_s=120)
    job.check(
        "nothing to do, no server started", third["exit"] == 0 and third["last"].get("completed") == 0, short(third)
    )
    exported = job.run("export", "export", url, "--trainer", "specforge", "--out", str(job.work / "specforge"))
    job.check("exported for a trainer", exported["exit"] == 0, exported["last"])
    if not job.args.attach:
        rows = published_rows(job)
        job.check("rows are the target's own words, ids exact", rows["exact"] == rows["rows"] > 0, rows)


def _idle(found: dict[str, Any]) -> bool:
    """Whether a run ended well without an answer, and without a start of a server in its record."""
    if found["exit"] != 0 or found["last"].get("completed") != 0:
        return False
    return not json.loads((Path(found["last"]["run_dir"]) / "record.json").read_text()).get("server_starts")


def published_rows(job: Job) -> dict[str, Any]:
    """Facts about the published training rows, from the working folder's copy."""
    import polars as pl

    frame = pl.read_parquet(str(job.work / "out" / "whole" / "runs" / "*" / "chunks" / "*" / "tokens.parquet"))
    sums = frame.select(
        rows=pl.len(),
        exact=pl.col("ids_exact").sum(),
        ids=pl.col("prompt_id").n_unique(),
        supervised_min=pl.col("n_supervised").min(),
        supervised_median=pl.col("n_supervised").median(),
        scaffold_median=pl.col("n_scaffold").median(),
    )
    return dict(sums.to_dicts()[0])


def incident(job: Job) -> None:
    """A server without MTP where MTP is wanted."""
    flags = ["--host", "127.0.0.1", "--api-key", KEY, "--enable-metrics", "--reasoning-parser", "qwen3"]
    flags += ["--max-running-requests", "64", "--mem-fraction-static", "0.3", "--disable-prefill-cuda-graph"]
    server = Sglang(job.args.model, flags, job.work / "plain.log", {}, 31500, 240)
    server.command[0] = str(job.args.sglang_python)
    with server:
        path = job.write("incident", {"mode": "attach", "urls": [server.url]})
        found = job.run("incident", "run", str(path), timeout_s=200)
    words = str(found["last"].get("error"))
    job.check("the run without MTP was stopped by a gate", found["exit"] == 3, [found["exit"], words])
    job.check("and says that MTP is off", bool(re.search(r"MTP|SPECULATION", words)), words)
    done = job.status("incident").get("done") or 0
    job.check("before the first prompt was answered", done == 0, done)
    job.save(incident={**short(found), "said": found["said"][-12:]})


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="tiny-qwen3.5-mtp of make_models.py")
    parser.add_argument("--tokenizer", type=Path, help="where it is not beside the model")
    parser.add_argument("--sglang-python", type=Path, help="interpreter of the environment that has sglang")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--limit-s", type=float, default=300, help="seconds for one run")
    parser.add_argument("--sections", default="healthy,incident")
    parser.add_argument("--attach", help="URL of a running server, in place of starting one")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.out = arguments.out.resolve()
    (arguments.out / "work").mkdir(parents=True, exist_ok=True)
    with (
        local_prefect(arguments.out / "work" / "prefect") as prefect,
        local_store(arguments.out / "work" / "s3") as store,
    ):
        job = Job(arguments, store, prefect.environment())
        for name in arguments.sections.split(","):
            try:
                {"healthy": healthy, "incident": incident}[name](job)
            except Exception as error:
                job.check(f"{name} ran", False, f"{type(error).__name__}: {error}")
    print(json.dumps({"failed": job.result["failed"], "out": str(arguments.out)}))
    return 1 if job.result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
