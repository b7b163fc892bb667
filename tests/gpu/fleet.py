#!/usr/bin/env python3
"""The request pool on real servers: its speed beside SGLang's own benchmark client, and a fleet that loses a server.

    python3 tests/gpu/fleet.py --model MODELS/shape-qwen3.6-27b --out fleet.json [--gpus 2] [--prompts 256]

One start of one server a GPU (27B shape, dummy weights, MTP with simulated acceptance 3: the text means nothing, the
work is real). Sections:

pool   output tokens/s at 32 in flight on one server, the pool and `sglang.benchmark.serving` in turn, same prompts and
       lengths, three pairs; tokens are the server's own counter for both. Bar 13: median ratio >= 0.97
kill   only with two GPUs: the pool on both, kill -9 of one server in mid-run: the other goes on, what was lost is asked
       again, the server comes back and is used again, every prompt is accounted for

Needs SGLang's environment and, of ours, polars, pyarrow, transformers, orjson, aiohttp. Exit status 1: a check failed.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from findings import WORDS, Findings
from tasks.client.metrics import read_service_sample_sync
from tasks.generation.engine import Engine
from tasks.generation.settings import BreakerSettings, GenerationSettings
from tasks.provisioning.fleet import Fleet, open_fleet
from tasks.provisioning.gpus import read_nvidia_smi
from tasks.provisioning.settings import ServingSettings
from tasks.records import Server
from tasks.runs import RunPaths
from tasks.settings import SamplingSettings, TargetSettings
from tasks.target.load import load_target
from tasks.validation.run import validate
from tasks.validation.settings import SourceSettings

IN_FLIGHT, TOKENS, PAIRS = 32, 256, 3
SAMPLING = SamplingSettings(temperature=0.7, top_p=0.95, top_k=20, max_tokens=TOKENS, thinking=False)
BODY = {
    **SAMPLING.model_dump(include={"temperature", "top_p", "top_k"}),
    "chat_template_kwargs": {"enable_thinking": False},
}
SETTINGS = GenerationSettings(
    chunk_rows=100_000,
    on_length="keep_prefix",
    drop_repetition=False,
    max_attempts=1,
    ramp_s=0,
    breaker=BreakerSettings(mode="monitor"),
)


class Bench(Findings):
    """Where things are and what was found; saved after every step."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        super().__init__(arguments.out, in_flight=IN_FLIGHT, tokens=TOKENS, prompts=arguments.prompts)
        self.model, self.work, self.count = arguments.model.resolve(), work, arguments.prompts
        self.target = load_target(TargetSettings(model=str(self.model)))

    def prompts(self, name: str, count: int) -> RunPaths:
        """A run folder with `count` prompts of about 64 tokens, and the same as the benchmark's JSONL."""
        paths = RunPaths(self.work, name)
        paths.run_dir.mkdir(parents=True)
        rng = random.Random(name)
        texts = [f"{i} " + " ".join(rng.choices(WORDS.split(), k=55)) for i in range(count)]
        rows = [
            {"conversations": [{"role": "user", "content": t}, {"role": "assistant", "content": "x y z u"}]}
            for t in texts
        ]
        (paths.run_dir / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = paths.run_dir / "prompts.jsonl"
        source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        validate(SourceSettings(paths=(str(source),)), self.target, paths.run_dir)
        return paths

    def engine(self, paths: RunPaths, servers: list[Server]) -> Engine:
        """The pool as the flow makes it."""
        return Engine(paths, self.target, SAMPLING, SETTINGS, servers, limits=IN_FLIGHT)


def measured(server: Server, work: Any) -> tuple[float, float]:
    """(tokens that the server counted, seconds) of `work()`."""
    before, began = read_service_sample_sync(server).generated_tokens_total or 0.0, time.monotonic()
    work()
    seconds = time.monotonic() - began
    time.sleep(1.0)
    return (read_service_sample_sync(server).generated_tokens_total or 0.0) - before, seconds


def with_pool(bench: Bench, server: Server, name: str, count: int) -> dict[str, float]:
    """`count` prompts through the pool."""
    paths = bench.prompts(name, count)

    async def work() -> None:
        engine = bench.engine(paths, [server])
        engine.start()
        try:
            while (progress := engine.progress()).done + progress.failed < count:
                await asyncio.sleep(0.02)
        finally:
            await engine.stop()

    tokens, seconds = measured(server, lambda: asyncio.run(work()))
    return {"tokens": tokens, "seconds": seconds, "tok_s": tokens / seconds}


def with_theirs(bench: Bench, server: Server, name: str) -> dict[str, float]:
    """The same through SGLang's own client; its own figure, which leaves its start-up out."""
    paths, found = bench.prompts(name, bench.count), bench.work / f"{name}.out"
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang-oai-chat"]
    command += ["--base-url", server.base_url, "--dataset-name", "custom", "--num-prompts", str(bench.count)]
    command += ["--dataset-path", str(paths.run_dir / "bench.jsonl"), "--sharegpt-output-len", str(TOKENS)]
    command += ["--max-concurrency", str(IN_FLIGHT), "--model", server.model, "--tokenizer", str(bench.model)]
    # Greedy is its default, and skips the filtering of a vocabulary of 248,320 that sampling pays for at every step.
    command += ["--extra-request-body", json.dumps(BODY)]
    command += ["--output-file", str(found), "--disable-tqdm", "--warmup-requests", "0", "--seed", "1"]
    env = {**os.environ, "OPENAI_API_KEY": server.api_key}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    if not found.exists():
        raise RuntimeError(done.stderr[-1500:] + done.stdout[-500:])
    value = json.loads(found.read_text().splitlines()[-1])
    return {"tokens": value["total_output_tokens"], "seconds": value["duration"], "tok_s": value["output_throughput"]}


def pool(bench: Bench, fleet: Fleet) -> None:
    """Alternating pairs on the first server."""
    server = fleet.servers[0]
    with_pool(bench, server, "warm", 64)
    pairs: list[dict[str, Any]] = []
    for number in range(PAIRS):
        ours = with_pool(bench, server, f"ours-{number}", bench.count)
        theirs = with_theirs(bench, server, f"theirs-{number}")
        pairs.append({"ours": ours, "theirs": theirs, "ratio": ours["tok_s"] / theirs["tok_s"]})
        print(f"    pair {number}: {json.dumps(pairs[-1])}", flush=True)
        bench.save(pairs=pairs)
    ratio = statistics.median(pair["ratio"] for pair in pairs)
    bench.check("pool / benchmark client, median (bar 13: >= 0.97)", ratio >= 0.97, round(ratio, 4))


async def kill(bench: Bench, fleet: Fleet) -> None:
    """Lose one of two servers in mid-run and get it back."""
    paths = bench.prompts("kill", 4000)
    engine = bench.engine(paths, list(fleet.servers))
    engine.start()
    fleet.subscribe(engine)
    running = fleet.members[1].running
    assert running is not None and running.pid is not None
    samples: list[dict[str, Any]] = []
    began, killed, back = time.monotonic(), 0.0, 0.0
    while time.monotonic() - began < 150:
        await asyncio.sleep(1.0)
        now, progress = time.monotonic(), engine.progress()
        states = dict(progress.servers)
        samples.append({"s": round(now - began, 1), "done": progress.done + progress.failed, "servers": states})
        if not killed and now - began > 8:
            killed = now
            os.kill(running.pid, signal.SIGKILL)
        name = fleet.servers[1].name
        if killed and not back and now - killed > 5 and states[name] == "up":
            back = now
        if back and now - back > 8:
            break
    end = engine.progress()
    await engine.stop("measured")
    after = [s["done"] for s in samples if killed - began + 2 < s["s"] < (back or 1e9) - began]
    bench.check("the other server went on", len(after) > 5 and after[-1] > after[0], after[:: max(1, len(after) // 6)])
    bench.check("the killed server came back", bool(back), f"{back - killed:.1f} s" if back else "never")
    again = bench.engine(paths, list(fleet.servers))
    await asyncio.to_thread(again.start)
    await again.wait_open(0)  # the journal is read when its chunk opens
    resumed = again.progress()
    await again.stop("counted")
    settled = resumed.done + resumed.failed
    bench.check("answers kept by the journal", settled >= end.done + end.failed, [end.done + end.failed, settled])
    bench.save(kill={"samples": samples[:: max(1, len(samples) // 20)], "events": fleet.events})


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="The request pool on real servers.")
    parser.add_argument("--model", type=Path, required=True, help="shape-qwen3.6-27b of make_models.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=256, help="of one run: 256 take about 35 s")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        os.environ.setdefault("REGEN_STATE_DIR", str(Path(folder) / "node"))
        bench = Bench(arguments, Path(folder))
        serving = ServingSettings(
            python=sys.executable,
            gpus=tuple(range(arguments.gpus)),
            slots=48,
            start_timeout_s=240,
            extra_args=("--load-format", "dummy", "--disable-prefill-cuda-graph"),
        )
        began = time.monotonic()
        with open_fleet(
            serving,
            TargetSettings(model=str(bench.model), mtp=True),
            RunPaths(Path(folder), "servers"),
            max_tokens=2048,
            progress=lambda line: print(f"    {time.strftime('%H:%M:%S')} {line}", flush=True),
            gpus=read_nvidia_smi,
            simulate_accept_length=3.0,
        ) as fleet:
            bench.save(start_s=round(time.monotonic() - began, 1), simulated_acceptance=True)
            try:
                pool(bench, fleet)
            except Exception as error:
                bench.check("pool ran", False, f"{type(error).__name__}: {str(error)[-1500:]}")
            if len(fleet.servers) > 1:
                asyncio.run(kill(bench, fleet))
    print(json.dumps({"failed": bench.result["failed"], "out": str(arguments.out)}))
    return 1 if bench.result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
