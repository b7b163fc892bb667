"""Bars 4 and 12: `kill -9` at random moments, and how soon a resumed run of 902,087 prompts sends its first request.

Bar 4: 50 kills, each resumed: 0 missing, 0 duplicated, redone <= what was in flight (tests/chaos does the same under
every fault). Bar 12: from the start of the process to the first request <= 10 s, < 2 GiB resident.

The big run is made up here: real prompts.parquet (902,087 rows), 90 finished chunks (their small records and stand-ins
for their Parquet files, which a resume does not read), 3 chunks half done with journals of 6 kB answers (page cache
warm), the rest untouched. The server is SIMULATED.
"""

import argparse
import asyncio
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "chaos"), str(HERE.parent), str(HERE.parent.parent)]

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from runs_for_tests import settings as run_settings  # noqa: E402
from simulator import SimFleet, SimSettings, SimTarget  # noqa: E402
from tasks.generation.engine import Engine  # noqa: E402
from tasks.generation.journal import Kind  # noqa: E402
from tasks.generation.prompts import PROMPT_SCHEMA  # noqa: E402
from tasks.generation.writer import COMPLETIONS, FAILURES  # noqa: E402
from tasks.records import ChunkRecord, Server  # noqa: E402
from tasks.runs import RunPaths, write_json  # noqa: E402
from tasks.settings import SamplingSettings  # noqa: E402

ROWS = 902_087
ANSWER_TOKENS = 1_000


def write_run(root: Path, rows: int) -> RunPaths:
    paths = RunPaths(root, "run1")
    paths.run_dir.mkdir(parents=True)
    with pq.ParquetWriter(paths.prompts, PROMPT_SCHEMA, compression="zstd") as writer:
        for first in range(0, rows, 20_000):
            ids = range(first, min(rows, first + 20_000))
            table = [
                {
                    "prompt_id": f"{i:032x}",
                    "messages": [{"role": "user", "content": f"question {i}: " + "what is meant by this? " * 12}],
                    "sample_index": 0,
                    "source": "bench",
                    "row": i,
                }
                for i in ids
            ]
            writer.write_table(pa.Table.from_pylist(table, schema=PROMPT_SCHEMA), row_group_size=5000)
    running = Engine(paths, SimTarget(), SamplingSettings(), run_settings(chunk_rows=5000), [])
    for index in range(running.plan.chunks // 2):
        finish_chunk(paths, running, index)
    for index in range(running.plan.chunks // 2, running.plan.chunks // 2 + 3):
        half_done(running, index)
    return paths


def finish_chunk(paths: RunPaths, running: Engine, index: int) -> None:
    first, last = running.plan.range(index)
    folder = paths.chunk(index)
    folder.mkdir(parents=True)
    pq.write_table(COMPLETIONS.empty_table(), folder / "completions.parquet")
    pq.write_table(FAILURES.empty_table(), folder / "failed.parquet")
    record = ChunkRecord(index, str(folder), last - first, last - first, 0, 1, str(folder / "completions.parquet"))
    write_json(folder / "chunk.json", record)


def half_done(running: Engine, index: int) -> None:
    chunk = running._store.open(index)
    rng = np.random.default_rng(index)
    for row in range(0, len(chunk.states), 2):
        answer = {
            "prompt_id": f"{chunk.rows[0] + row:032x}",
            "turn": 0,
            "content": "",
            "token_ids": rng.integers(1000, 99_999, ANSWER_TOKENS).tolist(),
        }
        chunk.journal.append(row, 0, Kind.LAST, answer)
    chunk.journal.close()


def resume(root: str, server: dict[str, Any], stop_file: str) -> None:
    """The child: a new process that resumes, as the flow's does."""
    from tasks.records import Capabilities

    record = Server(**{**server, "capabilities": Capabilities(**server["capabilities"])})
    paths = RunPaths(Path(root), "run1")
    running = Engine(paths, SimTarget(), SamplingSettings(), run_settings(chunk_rows=5000), [record], limits=256)
    running.start()

    async def wait() -> None:
        while not Path(stop_file).exists():
            await asyncio.sleep(0.05)
        await running.stop()

    asyncio.run(wait())
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def measure_resume(rows: int) -> dict[str, float]:
    root = Path(tempfile.mkdtemp())
    try:
        begun = time.monotonic()
        write_run(root, rows)
        made_s = time.monotonic() - begun
        with SimFleet(1, SimSettings(median_tokens=500, request_tok_s=5, max_running=256)) as fleet:
            from dataclasses import asdict

            stop_file = str(root / "stop")
            arguments = [str(root), json.dumps(asdict(fleet.records()[0])), stop_file]
            begun = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, __file__, "--resume", *arguments], stdout=subprocess.PIPE, text=True
            )
            while not fleet.servers[0].requests and process.poll() is None:
                time.sleep(0.005)
            first_s = time.monotonic() - begun
            while fleet.servers[0].requests < 256 and process.poll() is None:
                time.sleep(0.01)
            full_s = time.monotonic() - begun
            Path(stop_file).touch()
            output, _ = process.communicate(timeout=60)
        return {
            "rows": rows,
            "made_up_in_s": made_s,
            "first_request_s": first_s,
            "full_fleet_s": full_s,
            "peak_gib": int(output.split()[-1]) / 2**20,
        }
    finally:
        shutil.rmtree(root)


def measure_kills(kills: int) -> dict[str, Any]:
    from chaos_harness import LIMIT, SERVERS, case

    problems, redone = [], []
    seeds = [seed for seed in range(3 * kills) if seed % 3 != 2][:kills]  # the third of each three is a SIGTERM
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                redone.append(case("none", seed, Path(folder)).redone)
            except AssertionError as error:
                problems.append(f"seed {seed}: {error}")
    return {
        "kills": len(seeds),
        "missing_or_duplicated": len(problems),
        "problems": problems,
        "most_redone": max(redone, default=0),
        "in_flight": LIMIT * SERVERS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--resume", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.resume:
        resume(arguments.resume[0], json.loads(arguments.resume[1]), arguments.resume[2])
        return
    rows, kills = (20_000, 2) if arguments.small else (arguments.rows, arguments.kills)
    big = measure_resume(rows)
    print(
        f"{rows:,} prompts: first request after {big['first_request_s']:.2f} s, 256 in flight after "
        f"{big['full_fleet_s']:.2f} s, {big['peak_gib']:.2f} GiB (made up in {big['made_up_in_s']:.0f} s)",
        flush=True,
    )
    killed = measure_kills(kills)
    print(
        f"{killed['kills']} x kill -9 (SIMULATED servers): {killed['missing_or_duplicated']} with missing or doubled "
        f"rows; at most {killed['most_redone']} redone, {killed['in_flight']} were in flight"
    )
    summary = {
        "benchmark": "resume",
        "simulator": True,
        "resume": big,
        "kills": killed,
        "bar_4": not killed["problems"] and killed["most_redone"] <= killed["in_flight"],
        "bar_12": big["first_request_s"] <= 10 and big["peak_gib"] < 2,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
