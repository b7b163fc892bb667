"""Bar 11: what Prefect costs. The same engine on the same SIMULATED servers, with one task run a chunk and the live
progress artifact, against without; alternating pairs, median ratio. Bar: <= 1.02, and 902,087 prompts stay under 600
task runs in all (three a chunk).

Wall time is from the engine's start to its last chunk; starting Prefect's API server (a temporary one) is left out.
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

from prefect import flow  # noqa: E402
from prefect.testing.utilities import prefect_test_harness  # noqa: E402

from runs_for_tests import drain, engine, new_run, prompts  # noqa: E402
from simulator import SimFleet, SimSettings  # noqa: E402
from tasks.generation.engine import Engine  # noqa: E402
from tasks.generation.plan import Plan, make_plan  # noqa: E402
from tasks.generation.task import generate_chunk  # noqa: E402
from tasks.runs import RunPaths  # noqa: E402
from tasks.ui.task import LiveProgress  # noqa: E402

TASKS_A_CHUNK = 3


@flow(name="orchestration-benchmark", persist_result=False)
async def with_prefect(running: Engine) -> None:
    def read() -> tuple[float, str]:
        progress = running.progress()
        return 100 * progress.done / progress.total, f"{progress.done} of {progress.total}, {progress.tok_s:.0f} tok/s"

    async def one(index: int) -> None:
        await running.wait_open(index)
        await generate_chunk(running, index)
        running.release_chunk(index)

    with LiveProgress("bench-progress", read):
        await asyncio.gather(*(one(index) for index in running.chunk_indices))


async def one(orchestrated: bool, rows: int, chunk_rows: int, sim: SimSettings, folder: Path) -> float:
    with SimFleet(4, sim) as fleet:
        running = engine(new_run(folder, prompts(rows)), fleet, limits=16, chunk_rows=chunk_rows)
        begun = time.monotonic()
        running.start()
        await (with_prefect(running) if orchestrated else drain(running))
        wall = time.monotonic() - begun
        await running.stop()
    return wall


def task_runs(rows: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        plan: Plan = make_plan(RunPaths(Path(folder), "r"), rows, 5000)
    return plan.chunks * TASKS_A_CHUNK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    rows, chunk_rows, pairs = (200, 50, 1) if arguments.small else (5000, 625, arguments.pairs)
    sim = SimSettings(median_tokens=60, sigma=0.8, request_tok_s=100, speedup=2.0, length_by_prompt=True)
    ratios, walls = [], []
    with prefect_test_harness(server_startup_timeout=120):
        with tempfile.TemporaryDirectory() as folder:  # the first flow run ever also makes the server's tables
            asyncio.run(one(True, 32, 8, sim, Path(folder)))
        for pair in range(pairs):
            found = {}
            for orchestrated in (False, True) if pair % 2 == 0 else (True, False):
                with tempfile.TemporaryDirectory() as folder:
                    found[orchestrated] = asyncio.run(one(orchestrated, rows, chunk_rows, sim, Path(folder)))
            ratios.append(found[True] / found[False])
            walls.append(found)
            print(f"pair {pair}: without {found[False]:.2f} s, with {found[True]:.2f} s, {ratios[-1]:.4f}", flush=True)
    runs = task_runs(902_087)
    ratio = statistics.median(ratios)
    extra_s = statistics.median(found[True] - found[False] for found in walls)
    print(
        f"median {ratio:.4f}; {rows / chunk_rows:.0f} task runs in {walls[0][False]:.0f} s (a real run: one in hours)"
    )
    print(f"902,087 prompts: {runs} task runs")
    summary = {
        "benchmark": "orchestration",
        "simulator": True,
        "ratio": ratio,
        "ratios": ratios,
        "extra_s": extra_s,
        "load_average": os.getloadavg()[0],
        "task_runs_902087": runs,
        "bar_11": ratio <= 1.02 and runs < 600,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
