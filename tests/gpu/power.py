"""The power room on a real GPU with real SGLang: what NVML says, what serving costs, and whether the gate is right.

    python tests/gpu/power.py --tiny DIR --big DIR --out power.json --budget 560 nvml tiny-mtp tiny-plain
    python tests/gpu/power.py --tiny DIR --big DIR --out power.json --budget 560 big-mtp big-plain

Needs an NVIDIA GPU and an environment in which `sglang` starts (Python 3.11 or newer, with aiohttp, orjson, pydantic,
numpy, pyarrow, prometheus-client, psutil, click, rich and nvidia-ml-py; no Prefect, altair or polars). `--tiny` is a
small model with a working MTP head, `--big` a model directory that is served with `--load-format dummy`.

Sections run in the order given, each within what is left of `--budget` seconds; one that does not fit is noted as
skipped. `--out` holds one small JSON object; a second run with the same file adds its sections to it. Last line: that
object's summary; exit status 1 when something that ran was not as it should be (`failed`).

nvml        fields, limits and capabilities as read; bare idle watts; cost of one reading and of the sampler
tiny-mtp    watts, tokens, J/token and acceptance at C = 1, 8, 32, 128; hard rules; baseline written; gate again:
            HEALTHY; a stopped scheduler is found hung by the live watch
tiny-plain  the same levels without MTP; hard rules and gate say SPECULATION_OFF although MTP was asked for
big-mtp     the levels on the big shape, acceptance simulated (3.0); `regen diagnose` with a profile
big-plain   the same without MTP
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flows.commands.diagnose import attach
from sglang_process import Sglang
from tasks.power.baseline import Baselines
from tasks.power.diagnosis import diagnose
from tasks.power.gate import baseline_gate, hard_rules
from tasks.power.live import LiveWatch
from tasks.power.nvml import open_nvml
from tasks.power.probe import run_probe
from tasks.power.rig import Rig, idle_watts
from tasks.power.sampler import PowerSampler
from tasks.power.settings import PowerSettings
from tasks.power.verdict import facts, judge
from tasks.records import GateReport, Server

LEVELS = (1, 8, 32, 128)
GATE_C = 32
REST_S = 8.0
MTP = ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
MTP += ["--speculative-num-draft-tokens", "4"]
COMMON = ["--enable-metrics", "--host", "127.0.0.1", "--disable-radix-cache"]
TINY = ["--mem-fraction-static", "0.3", "--max-running-requests", "128", "--reasoning-parser", "qwen3"]
BIG = ["--load-format", "dummy", "--disable-prefill-cuda-graph", "--mm-feature-transport", "cpu"]
BIG_GRAPHS = ["--cuda-graph-bs-decode", "1", "8", "16", "32", "64"]


class Run:
    """What the sections share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.args = arguments
        self.until_s = time.monotonic() + arguments.budget
        self.nvml = open_nvml()
        if self.nvml is None:
            raise SystemExit("no NVIDIA GPU on this machine")
        self.info = self.nvml.gpus()[0]
        self.work = arguments.out.parent / "power-work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.settings = PowerSettings(
            sample_hz=10, probe_s=31.0, probe_output_tokens=512, idle_s=4.0, live_window_s=10.0
        )
        self.port = 31000

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def serve(self, model: Path, flags: list[str], name: str, env: dict[str, str] | None = None) -> Sglang:
        self.port += 1
        log = self.work / f"{name}.log"
        limit_s = min(300.0, self.left_s)
        return Sglang(model, [*COMMON, *flags], log, env or {}, self.port, limit_s)

    def attach(self, server: Sglang, name: str) -> Server:
        return replace(attach(server.url, ""), name=name, gpu_uuids=(self.info.uuid,))

    def rig(self, server: Server, sampler: PowerSampler, digest: str) -> Rig:
        return Rig([server], sampler, self.settings, model_digest=digest, mtp_wanted=True)


def short(report: GateReport) -> dict[str, Any]:
    """A report without its bulk."""
    bad = [f"{e.name}: {e.message}" for e in report.expectations if not e.passed]
    return {"verdict": report.verdict, "level": report.level.value, "stops": report.stops, "summary": report.summary,
            "failed": bad, "remarks": report.details.get("remarks", [])}  # fmt: skip


def rounded(value: Any) -> Any:
    """Numbers to 4 significant digits, recursively: the file stays small."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def section_nvml(run: Run) -> dict[str, Any]:
    nvml, uuid = run.nvml, run.info.uuid
    times = []
    for index in range(50):
        began = time.perf_counter()
        sample = nvml.read(uuid, slow=index % 10 == 0)
        times.append(time.perf_counter() - began)
    nvml.activity(uuid)
    with PowerSampler(run.work / "nvml.parquet", nvml, 5.0) as sampler:
        time.sleep(REST_S)
        idle = idle_watts(sampler.window(REST_S - 2))
        share = sampler.cpu_share
    activity = nvml.activity(uuid)
    times.sort()
    return {
        "info": asdict(run.info),
        "sample": asdict(sample),
        "read_ms_median": times[25] * 1e3,
        "read_ms_max": times[-1] * 1e3,
        "sampler_cpu_share_5hz": share,
        "bare_idle_w": idle.get(uuid),
        "activity_at_rest": asdict(activity) if activity else None,
        "transient_errors": nvml.transient_errors,
    }


async def level(run: Run, rig: Rig, server: Server, concurrency: int, idle_w: dict[str, float]) -> dict[str, Any]:
    """One row of the table: a window of the fixed probe at one concurrency."""
    uuid = run.info.uuid
    marker = asyncio.create_task(_activity(run, uuid, 5.0 + run.args.window))
    probe = await run_probe(server, concurrency, seconds=run.args.window, output_tokens=512, start_timeout_s=10)
    activity = await marker
    evidence = rig.evidence(server, probe, (probe.start_s, probe.end_s), idle_w)
    found = facts(evidence)
    gpu = found["gpus"][0] if found["gpus"] else {}
    return {
        "concurrency": concurrency,
        "tok_s": found["tok_s"],
        "power_w": found["power_w_per_gpu"],
        "share_of_limit": gpu.get("fraction_of_enforced_limit"),
        "dynamic_fraction": gpu.get("dynamic_fraction"),
        "j_per_token": found["j_per_token"],
        "accept_length": found["accept_length"],
        "running": found["running"],
        "queued": found["queued"],
        "kv_usage": found["kv_usage"],
        "sm_clock_mhz": gpu.get("sm_clock_mhz"),
        "temperature_c": gpu.get("temperature_c"),
        "utilization": gpu.get("utilization"),
        "reasons": gpu.get("reasons"),
        "counter_trusted": gpu.get("counter_trusted"),
        "sm": activity.sm if activity else None,
        "tensor": activity.tensor if activity else None,
        "dram": activity.dram if activity else None,
        "reached": probe.reached,
        "failures": dict(probe.failures),
        "warm_up_s": probe.warm_up_s,
        "verdict": judge(evidence).code.value,
    }


async def _activity(run: Run, uuid: str, after_s: float) -> Any:
    """Hardware counters over the inner part of the window."""
    await asyncio.sleep(5.0)
    run.nvml.activity(uuid)
    await asyncio.sleep(max(1.0, after_s - 6.0))
    return run.nvml.activity(uuid)


async def sweep(run: Run, rig: Rig, server: Server) -> dict[str, Any]:
    """Idle watts with the model loaded, then every level that still fits."""
    start_s = time.time()
    await asyncio.sleep(run.settings.idle_s)
    idle_w = idle_watts(rig.sampler.since(start_s))
    rows = []
    for concurrency in LEVELS:
        if run.left_s < run.args.window + 25:
            rows.append({"concurrency": concurrency, "skipped": "no time left"})
            continue
        rows.append(await level(run, rig, server, concurrency, idle_w))
        print(json.dumps(rounded(rows[-1])), flush=True)
    return {"idle_loaded_w": idle_w.get(run.info.uuid), "levels": rows}


def tiny(run: Run, mtp: bool) -> dict[str, Any]:
    name = "tiny-mtp" if mtp else "tiny-plain"
    baselines = Baselines(run.work / "baselines")
    limits = {name: GATE_C}
    with run.serve(run.args.tiny, [*TINY, *(MTP if mtp else [])], name) as server:
        found: dict[str, Any] = {"ready_s": server.ready_s}
        record = run.attach(server, name)
        found["slots"], found["engine_version"] = record.max_running_requests, record.version
        with PowerSampler(run.work / f"{name}.parquet", run.nvml, run.settings.sample_hz) as sampler:
            rig = run.rig(record, sampler, "tiny")

            async def steps() -> None:
                found["hard_rules"] = short(await hard_rules(rig))
                found.update(await sweep(run, rig, record))
                for again in ("gate_first", "gate_rerun") if mtp else ("gate",):
                    if run.left_s > 70:
                        found[again] = short(await baseline_gate(rig, limits, baselines))
                if mtp and run.left_s > 75:
                    found["hang"] = await hang(rig, record, server)

            kept(found, steps)
            found["sampler_cpu_share_10hz"], found["sensor_errors"] = sampler.cpu_share, sampler.errors
            found["energy_kwh"] = sampler.energy_kwh
    return found


async def hang(rig: Rig, record: Server, server: Sglang) -> dict[str, Any]:
    """Stop the scheduler for 32 s under load: the watch must call it hung, and well again after it goes on."""
    pid = server.scheduler()
    if pid is None:
        return {"skipped": "no scheduler process found"}
    told: list[tuple[float, str, str]] = []
    changes: list[tuple[float, str]] = []
    began_s = time.time()
    watch = LiveWatch(
        rig,
        lambda: {record.name: 8},
        on_change=lambda report: changes.append((time.time() - began_s, report.verdict)),
        on_hung=lambda name, why: told.append((time.time() - began_s, name, why)),
        every_s=1.0,
    )
    load = asyncio.create_task(run_probe(record, 8, seconds=50.0, output_tokens=3000, start_timeout_s=10))
    with watch:
        await asyncio.sleep(10)
        stopped_s = time.time() - began_s
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(32)
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(8)
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    return {
        "stopped_at_s": stopped_s,
        "told": told,
        "changes": changes,
        "last": watch.report.verdict if watch.report else None,
    }


def big(run: Run, mtp: bool) -> dict[str, Any]:
    name = "big-mtp" if mtp else "big-plain"
    slots = "64" if mtp else "128"
    graphs = [*BIG_GRAPHS, *([] if mtp else ["128"])]
    flags = [*BIG, *graphs, "--max-running-requests", slots, *(MTP if mtp else [])]
    env = {"SGLANG_SIMULATE_ACC_LEN": "3"} if mtp else {}
    with run.serve(run.args.big, flags, name, env) as server:
        found: dict[str, Any] = {"ready_s": server.ready_s}
        record = run.attach(server, name)
        with PowerSampler(run.work / f"{name}.parquet", run.nvml, run.settings.sample_hz) as sampler:
            rig = run.rig(record, sampler, "big")

            async def steps() -> None:
                found.update(await sweep(run, rig, record))
                if run.left_s > 60:
                    seen = await diagnose(
                        rig, record, folder=run.work / f"{name}-trace", seconds=6, steps=12, load=GATE_C,
                        profile_timeout_s=min(90.0, run.left_s - 20),
                    )  # fmt: skip
                    found["diagnosis"] = seen.as_dict()
                    found["diagnosis"].pop("evidence")

            kept(found, steps)
    return found


def kept(found: dict[str, Any], steps: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the steps of a section; what they found before an error is kept with it."""
    try:
        asyncio.run(steps())
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:2000]


SECTIONS: dict[str, tuple[Callable[[Run], dict[str, Any]], float]] = {
    "nvml": (section_nvml, 20),
    "tiny-mtp": (lambda run: tiny(run, True), 150),
    "tiny-plain": (lambda run: tiny(run, False), 150),
    "big-mtp": (lambda run: big(run, True), 150),
    "big-plain": (lambda run: big(run, False), 150),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", type=Path, help="Directory of the small model with an MTP head.")
    parser.add_argument("--big", type=Path, help="Directory of the big shape (dummy weights).")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; sections are added to it.")
    parser.add_argument("--budget", type=float, default=560.0, help="Seconds for everything.")
    parser.add_argument("--window", type=float, default=8.0, help="Seconds of each level.")
    parser.add_argument("sections", nargs="*", default=["nvml"], choices=[*SECTIONS], metavar="SECTION")
    args = parser.parse_args()
    # A limit set outside must still stop the server: SystemExit runs the context managers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    run = Run(args)
    for name in args.sections:
        section, least_s = SECTIONS[name]
        if run.left_s < least_s:
            results[name] = {"skipped": f"{run.left_s:.0f} s left, {least_s:.0f} s needed"}
        else:
            print(f"== {name} ({run.left_s:.0f} s left)", flush=True)
            began_s = time.monotonic()
            try:
                results[name] = section(run)
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            results[name]["section_s"] = time.monotonic() - began_s
        args.out.write_text(json.dumps(rounded(results), indent=1, default=str) + "\n")
    found = summary(results)
    print(json.dumps(found))
    return 1 if found["failed"] else 0


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """What must be right: HEALTHY on the rerun, SPECULATION_OFF without MTP, the hang found."""
    tiny_mtp, plain = results.get("tiny-mtp", {}), results.get("tiny-plain", {})
    told = [why for _, _, why in (tiny_mtp.get("hang") or {}).get("told", [])]
    wrong = [f"{name}: {r['error']}" for name, r in results.items() if "error" in r]
    for where, name, wanted in (
        (tiny_mtp, "gate_rerun", "HEALTHY"),
        (plain, "hard_rules", "SPECULATION_OFF"),
        (plain, "gate", "SPECULATION_OFF"),
    ):
        seen = (where.get(name) or {}).get("verdict")
        if seen not in (None, wanted):
            wrong.append(f"{name} is {seen}, expected {wanted}")
    if (tiny_mtp.get("hang") or {}).get("stopped_at_s") and not told:
        wrong.append("the stopped scheduler was not found hung")
    return {
        "failed": wrong,
        "gate_rerun": (tiny_mtp.get("gate_rerun") or {}).get("verdict"),
        "hard_rules_without_mtp": (plain.get("hard_rules") or {}).get("verdict"),
        "gate_without_mtp": (plain.get("gate") or {}).get("verdict"),
        "hang_found": told,
        "supported": {n: (r.get("diagnosis") or {}).get("supported") for n, r in results.items() if "diagnosis" in r},
    }


if __name__ == "__main__":
    sys.exit(main())
