"""Bars 1 and 2: slots busy over the run but its drain, and wall time against the work-conserving bound.

4 SIMULATED servers x 16 slots, log-normal lengths (sigma 1); equal servers / one 2x slower / one killed and back.
Bar 1: >= 0.99 / >= 0.99 of live slots / >= 0.97 of live slots. Bar 2: wall <= 1.03 x (total service time / slots + the
longest request), equal servers. Beside it, in the same run: the published scheduling of SpecForge and Automodel, as
described in peer_schedules.py (descriptions, not their packages).

A request takes a few seconds here (`--median`: 240 tokens are the 4 s of the published comparison) instead of minutes,
so that our fixed costs weigh far more than in a real run; ramp and probe are scaled alike (0 s and 0.2 s). Servers and
engine share this machine's cores.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

import peer_schedules  # noqa: E402
from runs_for_tests import drain, engine, new_run, prompts  # noqa: E402
from simulator import Fault, SimFleet, SimSettings  # noqa: E402
from tasks.client.chat import ChatRequest, Sampling  # noqa: E402
from tasks.generation.sampling import seed_of  # noqa: E402

SERVERS, SLOTS = 4, 16
TOK_S = 100.0


@dataclass(slots=True)
class Meter:
    """Reads the servers' own slot clocks, in their loop."""

    fleet: SimFleet
    rows: int
    begun: tuple[float, float] | None = None
    drained: tuple[float, float] | None = None
    dead_slot_s: float = 0.0
    _at: float = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while self.drained is None:
            await asyncio.sleep(0.002)
            now = loop.time()
            for server in self.fleet.servers:
                server.batch._advance()
            busy = sum(server.batch.busy_slot_s for server in self.fleet.servers)
            asked = sum(server.requests for server in self.fleet.servers)
            if self.begun is None and asked:
                self.begun, self._at = (now, busy), now
            if self.begun is not None:
                dead = sum(server._state != "ok" for server in self.fleet.servers)
                self.dead_slot_s += dead * SLOTS * (now - self._at)
                self._at = now
                if asked >= self.rows:
                    self.drained = (now, busy)

    @property
    def occupancy(self) -> float:
        assert self.begun and self.drained
        wall = self.drained[0] - self.begun[0]
        return (self.drained[1] - self.begun[1]) / (SERVERS * SLOTS * wall - self.dead_slot_s)


def sims(scenario: str, median: float) -> list[SimSettings]:
    base = SimSettings(median_tokens=median, sigma=1.0, request_tok_s=TOK_S, max_running=SLOTS, length_by_prompt=True)
    slow = SimSettings(
        median_tokens=median, sigma=1.0, request_tok_s=TOK_S / 2, max_running=SLOTS, length_by_prompt=True
    )
    return [slow if scenario == "slow" and index == 0 else base for index in range(SERVERS)]


async def ours(fleet: SimFleet, made: list, folder: Path, scenario: str) -> None:
    running = engine(new_run(folder, made), fleet, limits=SLOTS, chunk_rows=100, probe_s=0.2)
    running.start()
    await drain(running)
    await running.stop()


async def peer(name: str, fleet: SimFleet, made: list) -> None:
    requests = [
        ChatRequest(
            f"{index:032x}",
            [{"role": "user", "content": prompt.messages[0].content}],
            Sampling(1.0, 0.95, 20, max_tokens=16384, seed=seed_of(0, prompt.prompt_id, 0, 0, 0)),
            thinking=True,
        )
        for index, prompt in enumerate(sorted(made, key=lambda prompt: prompt.prompt_id))
    ]
    await getattr(peer_schedules, name)(fleet.records(), requests, SLOTS)


def one(driver: str, scenario: str, rows: int, median: float) -> dict[str, float]:
    made = prompts(rows)
    with tempfile.TemporaryDirectory() as folder, SimFleet(settings=sims(scenario, median)) as fleet:
        meter = Meter(fleet, rows)
        loop = fleet._loop
        assert loop is not None
        measuring = asyncio.run_coroutine_threadsafe(meter.run(), loop)
        if scenario == "killed":
            fleet.inject(0, Fault("crash", after_requests=rows // 16, lasts_s=rows * median / TOK_S / 64 / 4))
        begun = time.monotonic()
        work = ours(fleet, made, Path(folder), scenario) if driver == "ours" else peer(driver, fleet, made)
        asyncio.run(work)
        wall = time.monotonic() - begun
        measuring.result(10)
        first = meter.begun[0] if meter.begun else 0.0
        last = max(server.last_end_s for server in fleet.servers)
        services = [s for server in fleet.servers for s in server.services]
        bound = sum(services) / (SERVERS * SLOTS) + max(services)
        return {
            "occupancy": meter.occupancy,
            "wall_s": last - first,
            "with_start_s": wall,
            "bound_s": bound,
            "ratio": (last - first) / bound,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--median", type=float, default=240.0, help="tokens; 100 tokens take a second")
    parser.add_argument("--only-ours", action="store_true", help="leave the peers' schedules out")
    arguments = parser.parse_args()
    rows, median = (300, 15.0) if arguments.small else (arguments.rows, arguments.median)
    results: dict[str, dict[str, float]] = {}
    print(f"SIMULATED servers; {rows} rows, {SERVERS} x {SLOTS} slots")
    print(f"{'driver':12s} {'scenario':9s} {'slots busy':>10s} {'wall s':>8s} {'bound s':>8s} {'ratio':>6s}")
    for scenario in ("equal", "slow", "killed"):
        for driver in ("ours", "specforge", "automodel"):
            if driver != "ours" and (scenario == "killed" or arguments.small or arguments.only_ours):
                continue
            found = one(driver, scenario, rows, median)
            results[f"{driver}/{scenario}"] = found
            print(
                f"{driver:12s} {scenario:9s} {found['occupancy']:10.4f} {found['wall_s']:8.2f} {found['bound_s']:8.2f} "
                f"{found['ratio']:6.3f}",
                flush=True,
            )
    bars = {"equal": 0.99, "slow": 0.99, "killed": 0.97}
    summary = {
        "benchmark": "scheduling",
        "simulator": True,
        "rows": rows,
        "median_tokens": median,
        "load_average": os.getloadavg()[0],
        "results": results,
        "bar_1": {name: results[f"ours/{name}"]["occupancy"] >= bar for name, bar in bars.items()},
        "bar_2": results["ours/equal"]["ratio"] <= 1.03,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
