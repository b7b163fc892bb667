"""The chaos suite: each fault × N seeds × kill and resume. `--seeds 50` is the full one, CI runs a few.

Last line: one JSON object with what was run and what failed.
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

from chaos_harness import FAULTS, Result, case  # noqa: E402


def one(fault: str, seed: int) -> Result | str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return case(fault, seed, Path(folder))
        except Exception as error:
            return f"{fault} seed {seed}: {type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a handful of cases for CI")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + (1 if arguments.small else arguments.seeds))
    faults = ["none", "reset", "empty", "crash", "hang"] if arguments.small else arguments.faults
    todo = [(fault, seed) for fault in faults for seed in seeds]
    problems: list[str] = []
    by_fault: dict[str, list[Result]] = defaultdict(list)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for outcome in pool.map(lambda pair: one(*pair), todo):
            if isinstance(outcome, str):
                problems.append(outcome)
                print("FAILED", outcome, flush=True)
            else:
                by_fault[outcome.fault].append(outcome)
    print(f"{'fault':22s} {'cases':>6s} {'done':>6s} {'failed':>6s} {'pending at kill':>16s} {'redone':>7s} {'s':>7s}")
    for fault, results in by_fault.items():
        total = {n: sum(getattr(r, n) for r in results) for n in ("done", "failed", "pending_at_kill", "redone")}
        mean = sum(r.seconds for r in results) / len(results)
        print(
            f"{fault:22s} {len(results):6d} {total['done']:6d} {total['failed']:6d} {total['pending_at_kill']:16d} "
            f"{total['redone']:7d} {mean:7.2f}"
        )
    summary = {
        "benchmark": "chaos",
        "simulator": True,
        "cases": len(todo),
        "missing_or_duplicated": len(problems),
        "problems": problems[:20],
        "bar_4": not problems,
    }
    print(json.dumps(summary))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
