#!/usr/bin/env python3
"""Provisioning on a real GPU with a real SGLang and the tiny model of make_models.py. Writes one small JSON file.

    python3 tests/gpu/serving.py --model MODELS/tiny-qwen3.5-mtp --out tests/gpu/results/serving.json [--budget-s 570]

Run it with the interpreter of an environment in which sglang is installed, from the repository's root. Sections, each
with its own time box, in this order; what no longer fits into the budget is written as skipped:

mtp    starts with MTP through open_fleet: verdict ON_AND_EFFECTIVE, the fixed text, acceptance length 2.909, the canary
kill   kill -9 of that server in the middle of an answer: noticed, told, back with the same address and key
plain  starts without MTP: verdict OFF, the same text
oom    a memory fraction that cannot hold the draft's KV cache: recognised, recovered by the ladder
plan27b  a 27B-shaped config with dummy weights beside the tiny model's folder: the plan's running requests start at
the first attempt, and as many really run at once (SGLang's defaults run 22 on an H200)
hang   SIGSTOP on the scheduler: noticed by its heartbeat while /health still waits, restarted
pair   only with two GPUs: two servers, one killed while the other goes on answering

Needs beside SGLang's own environment nothing but this repository (of third parties it imports aiohttp, orjson,
pydantic and prometheus_client, which SGLang has too). Exit status 1 when something that was run is not as it should be.
"""

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tasks.provisioning.canary import ask, checks  # noqa: E402
from tasks.provisioning.fleet import Fleet, open_fleet  # noqa: E402
from tasks.provisioning.gpus import read_nvidia_smi  # noqa: E402
from tasks.provisioning.mtp import gather, judge  # noqa: E402
from tasks.provisioning.settings import ServingSettings  # noqa: E402
from tasks.provisioning.supervisor import start_ticks  # noqa: E402
from tasks.provisioning.wire import call  # noqa: E402
from tasks.records import Server  # noqa: E402
from tasks.runs import RunPaths  # noqa: E402
from tasks.settings import SamplingSettings, TargetSettings  # noqa: E402

THINKING = "Okay, the user wants a short answer."
ANSWER = "Hello there! How can I help you today?"
ACCEPT_LENGTH = 2.909
SLOTS = 16
START_S = 240.0
PROMPT = [{"role": "user", "content": "Say hello."}]


@dataclass
class Bench:
    """One run of this script: where things are, what was found."""

    model: Path
    work: Path
    out: Path
    deadline: float
    python: str
    result: dict[str, Any]
    failed: list[str] = field(default_factory=list)
    number: int = 0

    def check(self, section: dict[str, Any], name: str, good: bool, found: Any = None) -> None:
        """Record one statement."""
        section.setdefault("checks", {})[name] = {"ok": bool(good), "found": found}
        print(f"    {'ok  ' if good else 'FAIL'} {name}: {found}", flush=True)
        if not good:
            self.failed.append(name)

    def open(self, *, mtp: bool, gpus: int = 1, model: Path | None = None, **serving: Any) -> Fleet:
        """A fleet of its own run folder on the first GPUs."""
        self.number += 1
        options = {"python": self.python, "slots": SLOTS, "start_timeout_s": START_S, "mean_tokens": 1024, **serving}
        return open_fleet(
            ServingSettings(gpus=tuple(range(gpus)), **options),
            TargetSettings(model=str(model or self.model), mtp=mtp),
            RunPaths(self.work, f"run-{self.number}"),
            max_tokens=2048,
            progress=lambda line: print(f"    {time.strftime('%H:%M:%S')} {line}", flush=True),
            gpus=read_nvidia_smi,
        )

    def save(self) -> None:
        """Write what is known so far: a time limit from outside must not lose it."""
        self.result["failed"] = self.failed
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.result, indent=1) + "\n")


class Listener:
    """Times of what the supervisor tells."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, str]] = []
        self.back = threading.Event()

    def server_down(self, name: str, reason: str) -> None:
        self.told.append(("down", time.monotonic(), reason))

    def server_up(self, name: str) -> None:
        self.told.append(("up", time.monotonic(), name))
        self.back.set()


def chat(server: Server, timeout_s: float = 60, **more: Any) -> dict[str, Any]:
    """One greedy chat answer's first choice."""
    body = {"model": server.model, "messages": PROMPT, "max_tokens": 64, "temperature": 0, **more}
    value = call(f"{server.base_url}/v1/chat/completions", body, api_key=server.api_key, timeout_s=timeout_s).object()
    choices = value.get("choices") or [{}]
    return dict(choices[0])


def text_is_right(bench: Bench, section: dict[str, Any], server: Server) -> None:
    """Fixed thinking and answer, with thinking on."""
    message = chat(server, chat_template_kwargs={"enable_thinking": True}).get("message") or {}
    found = [message.get("reasoning_content"), (message.get("content") or "").strip()]
    bench.check(section, "fixed text", found == [THINKING, ANSWER], found)


def starts_of(fleet: Fleet) -> list[dict[str, Any]]:
    """Attempts, small enough to keep."""
    kept = ("attempt", "reason", "outcome", "failure", "evidence", "seconds", "facts", "warnings")
    rows = []
    for record in fleet.records:
        row = {name: record[name] for name in kept if record.get(name)}
        config = record.get("config") or {}
        rows.append({**row, "max_running": config.get("max_running"), "mem_fraction": config.get("mem_fraction")})
    return rows


def verdict(bench: Bench, section: dict[str, Any], server: Server, fleet: Fleet, wanted: bool, expected: str) -> None:
    """The MTP verdict on this server."""
    evidence = gather(server)
    found = judge(evidence, fleet.serving.mtp, wanted)
    section["mtp"] = {name: getattr(evidence, name) for name in evidence.__slots__ if name != "server"}
    bench.check(section, f"verdict (wanted: {wanted})", found.verdict == expected, f"{found.verdict}: {found.message}")


def with_mtp(bench: Bench, section: dict[str, Any]) -> None:
    """Sections mtp and kill share one server."""
    with bench.open(mtp=True) as fleet:
        section["starts"] = starts_of(fleet)
        server = fleet.servers[0]
        bench.check(section, "engine", server.engine == "sglang", f"{server.engine} {server.version}")
        text_is_right(bench, section, server)
        acceptance(bench, section, server)
        verdict(bench, section, server, fleet, True, "ON_AND_EFFECTIVE")
        canary(bench, section, server)
        section["plan_against_start"] = plan_against_start(bench, fleet)
        bench.save()
        kill(bench, bench.result["sections"].setdefault("kill", {}), fleet)


def acceptance(bench: Bench, section: dict[str, Any], server: Server) -> None:
    """64 tokens after `hello`: the tiny model's acceptance length is known."""
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True}}
    answer = call(f"{server.base_url}/generate", body, api_key=server.api_key, timeout_s=60).object()
    length = (answer.get("meta_info") or {}).get("spec_accept_length")
    bench.check(section, "acceptance length", bool(length) and abs(length - ACCEPT_LENGTH) < 0.001, length)


def canary(bench: Bench, section: dict[str, Any], server: Server) -> None:
    """The thinking canary, without the tokenizer (this environment need not have ours)."""
    import asyncio

    seen = asyncio.run(ask(server, None, SamplingSettings(max_tokens=2048)))
    failed = [item.name for item in checks(seen, thinking=True) if not item.passed]
    bench.check(section, "thinking canary", not failed, failed or "all passed")


def plan_against_start(bench: Bench, fleet: Fleet) -> dict[str, Any]:
    """What was planned beside what the server's log says."""
    record = json.loads((bench.work / "runs" / f"run-{bench.number}" / "record.json").read_text())
    plan, facts = record["memory_plan"], fleet.records[-1]["facts"]
    return {
        "planned_kv_tokens": plan["kv_tokens"],
        "kv_tokens": facts.get("kv_tokens"),
        "planned_free_gib": round(plan["bytes"]["free_before_graphs"] / (1 << 30), 2),
        "free_gb": facts.get("free_gb"),
        "planned_running": plan["max_running_requests"],
        "running": fleet.servers[0].max_running_requests,
        "fraction": plan["mem_fraction_static"],
    }


def kill(bench: Bench, section: dict[str, Any], fleet: Fleet) -> None:
    """kill -9 of the server's main process while it writes."""
    running = fleet.members[0].running
    assert running is not None and running.pid is not None
    pid = running.pid
    after_signal(bench, section, fleet, 0, lambda: os.kill(pid, signal.SIGKILL))
    bench.check(section, "the killed process is gone", start_ticks(pid) is None)
    text_is_right(bench, section, fleet.servers[0])


def after_signal(
    bench: Bench, section: dict[str, Any], fleet: Fleet, member: int, hurt: Callable[[], None], notice_s: float = 30.0
) -> None:
    """Hurt a server in the middle of an answer; time until it is noticed, and until it is back."""
    before, listener, answers = fleet.servers[member], Listener(), list[dict[str, Any]]()
    fleet.subscribe(listener)
    long = {"max_tokens": 1900, "ignore_eos": True, "timeout_s": 120}
    sender = threading.Thread(target=lambda: answers.append(chat(before, **long)), daemon=True)
    sender.start()
    time.sleep(0.5)
    hurt()
    began = time.monotonic()
    listener.back.wait(START_S + notice_s)
    times = {kind: round(at - began, 2) for kind, at, _ in listener.told}
    section |= {"noticed_s": times.get("down"), "back_s": times.get("up"), "told": [t[2] for t in listener.told]}
    section["starts"] = starts_of(fleet)
    bench.check(section, "noticed", times.get("down", 999) < notice_s, times.get("down"))
    bench.check(section, "back", "up" in times, times.get("up"))
    after = fleet.servers[member]
    same = (before.base_url, before.api_key) == (after.base_url, after.api_key)
    bench.check(section, "same address and key", same)


def without_mtp(bench: Bench, section: dict[str, Any]) -> None:
    """The same target without speculation."""
    with bench.open(mtp=False) as fleet:
        section["starts"] = starts_of(fleet)
        server = fleet.servers[0]
        text_is_right(bench, section, server)
        verdict(bench, section, server, fleet, True, "OFF")
        verdict(bench, section, server, fleet, False, "OFF")


def out_of_memory(bench: Bench, section: dict[str, Any]) -> None:
    """The tiny model's draft needs as much KV as its target: at 0.9 of the card both do not fit."""
    with bench.open(mtp=True, mem_fraction=0.9, start_attempts=4) as fleet:
        section["starts"] = starts_of(fleet)
        first = fleet.records[0]
        bench.check(section, "recognised", "out of GPU memory" in first.get("failure", ""), first.get("failure"))
        tries = len(fleet.records)
        bench.check(section, "recovered", tries > 1 and fleet.records[-1]["outcome"] == "ready", f"{tries} attempts")
        text_is_right(bench, section, fleet.servers[0])


def plan_27b(bench: Bench, section: dict[str, Any]) -> None:
    """The memory plan on the real card: it must start at once and hold what it promises."""
    shape = bench.model.parent / "shape-qwen3.6-27b"
    if not shape.is_dir():
        section["skipped"] = f"no {shape.name} beside the tiny model (make_models.py --shape27b)"
        return
    with bench.open(
        mtp=True, model=shape, slots=None, mean_tokens=4096, extra_args=("--load-format", "dummy")
    ) as fleet:
        section["starts"] = starts_of(fleet)
        section["plan_against_start"] = plan_against_start(bench, fleet)
        server, facts = fleet.servers[0], fleet.records[-1]["facts"]
        running = server.max_running_requests or 0
        bench.check(section, "first attempt", len(fleet.records) == 1, f"{len(fleet.records)} attempts")
        bench.check(section, "twice the defaults", running >= 44, f"{running} running requests, defaults 22")
        bench.check(section, "memory left", facts.get("free_gb", 0) > 2, facts.get("free_gb"))
        answers, peak = load(server, running)
        bench.check(section, "all answered", answers == running, f"{answers} of {running}")
        bench.check(section, "ran at once", peak >= 44, f"at most {peak} running")


def load(server: Server, requests: int) -> tuple[int, int]:
    """So many requests at once; how many were answered, and the most that ran together."""
    done: list[bool] = []

    def one() -> None:
        done.append(bool(chat(server, timeout_s=120, max_tokens=400, ignore_eos=True).get("finish_reason")))

    threads = [threading.Thread(target=one, daemon=True) for _ in range(requests)]
    for thread in threads:
        thread.start()
    peak = 0
    while any(thread.is_alive() for thread in threads):
        loads = call(f"{server.base_url}/v1/loads", api_key=server.api_key).object().get("loads") or [{}]
        peak = max(peak, int(loads[0].get("num_running_reqs") or 0))
        time.sleep(0.2)
    return sum(done), peak


def hang(bench: Bench, section: dict[str, Any]) -> None:
    """SIGSTOP on the scheduler: /health waits for 20 s, the heartbeat grows at once."""
    with bench.open(mtp=True, hang_timeout_s=12.0) as fleet:
        running = fleet.members[0].running
        assert running is not None and running.pid is not None
        scheduler = find_scheduler(running.pid)
        bench.check(section, "scheduler found", scheduler is not None, bool(scheduler))
        if scheduler is not None:
            after_signal(bench, section, fleet, 0, lambda: os.kill(scheduler, signal.SIGSTOP), 40.0)
            bench.check(section, "the stopped process is gone", start_ticks(scheduler) is None)


def find_scheduler(session: int) -> int | None:
    """The process titled sglang::scheduler in the server's session."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes()
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if b"sglang::scheduler" in title and int(fields[3]) == session:
                return int(entry.name)
    return None


def pair(bench: Bench, section: dict[str, Any]) -> None:
    """Two servers on two GPUs; one is killed, the other must not notice."""
    if len(read_nvidia_smi()) < 2:
        section["skipped"] = "one GPU"
        return
    with bench.open(mtp=True, gpus=2) as fleet:
        section["starts"] = starts_of(fleet)
        bench.check(section, "two servers", len({server.gpu_uuids for server in fleet.servers}) == 2)
        running, other, answered = fleet.members[0].running, fleet.servers[1], list[bool]()
        assert running is not None and running.pid is not None
        stop = threading.Event()

        def ask_other() -> None:
            while not stop.wait(0.5):
                answered.append((chat(other).get("message") or {}).get("content", "").strip() == ANSWER)

        asker = threading.Thread(target=ask_other, daemon=True)
        asker.start()
        pid = running.pid
        after_signal(bench, section, fleet, 0, lambda: os.kill(pid, signal.SIGKILL))
        stop.set()
        asker.join(60)
        bench.check(section, "the other went on", all(answered) and len(answered) > 5, f"{len(answered)} answers")


SECTIONS: dict[str, tuple[Callable[[Bench, dict[str, Any]], None], float]] = {
    "mtp": (with_mtp, 150.0),
    "plain": (without_mtp, 70.0),
    "oom": (out_of_memory, 120.0),
    "plan27b": (plan_27b, 130.0),
    "hang": (hang, 150.0),
    "pair": (pair, 180.0),
}
"""Each section and the seconds it needs, with warm kernel caches (recorded starts: 51 to 70 s)."""


def run(bench: Bench, names: list[str]) -> None:
    """Every section that still fits into the budget; a failure in one does not stop the next."""
    for name in names:
        section = bench.result["sections"].setdefault(name, {})
        work, needed = SECTIONS[name]
        left = bench.deadline - time.monotonic()
        if left < needed:
            section["skipped"] = f"{left:.0f} s left, {needed:.0f} needed"
            print(f"{name}: skipped, {section['skipped']}", flush=True)
            continue
        print(f"{name}: {left:.0f} s left", flush=True)
        began = time.monotonic()
        try:
            work(bench, section)
        except Exception as error:
            bench.check(section, f"{name} ran", False, f"{type(error).__name__}: {str(error)[:600]}")
        section["seconds"] = round(time.monotonic() - began, 1)
        bench.save()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Provisioning on a real GPU.")
    parser.add_argument("--model", type=Path, required=True, help="tiny-qwen3.5-mtp, made by make_models.py")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--sections", default="mtp,plain,oom,plan27b,hang,pair")
    parser.add_argument("--budget-s", type=float, default=570.0)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has sglang")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="    %(message)s")
    # A time limit from outside must still end the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    gpus = read_nvidia_smi()
    result: dict[str, Any] = {"gpus": [gpu.name for gpu in gpus], "sections": {}}
    with tempfile.TemporaryDirectory(prefix="serving-") as work:
        os.environ.setdefault("REGEN_STATE_DIR", str(Path(work) / "node"))
        deadline = time.monotonic() + arguments.budget_s
        model = arguments.model.resolve()
        bench = Bench(model, Path(work), arguments.out, deadline, arguments.python, result)
        run(bench, arguments.sections.split(","))
        bench.save()
        kept = arguments.out.parent / "serving-logs"
        for log in sorted(Path(work).glob("runs/*/logs/*.log")):
            kept.mkdir(parents=True, exist_ok=True)
            data = log.read_bytes()
            (kept / f"{log.parents[1].name}-{log.name}").write_bytes(data[-200_000:])
    print(json.dumps({"failed": bench.failed, "sections": list(result["sections"])}))
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
