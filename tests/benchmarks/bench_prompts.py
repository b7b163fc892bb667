"""Bar 6: validation of 900,000 chat prompts in 2 GB of JSONL: parse, canonical form, reasons, ids, duplicates.

What: the whole of `tasks.validation.run.validate` without a target, from the file to prompts.parquet and
rejected.parquet, the proof by id included. Rows have one to five turns of Zipf words in two schemas (role/content and
from/value), an old answer each, 1 % exact repeats and 1 % broken rows (torn JSON, unknown roles, no user turn).
Speed a core is bytes ÷ CPU seconds of the parent and its workers; resident memory is that of parent and workers added
up (proportional share), sampled five times a second. Page cache warm.

Bar: ≥ 40 MB/s a core, < 2 GiB resident; sums exact.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import orjson
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tasks.validation.run import validate
from tasks.validation.settings import SourceSettings

MEAN_WORDS = 375


def words_text(rng: np.random.Generator, size: int) -> list[str]:
    """Zipf-distributed made-up words, some not ASCII, some with mark-up."""
    letters = "etaoinshrdlcumwfgypbvk"
    vocabulary = ["".join(letters[i] for i in rng.integers(0, 22, rng.integers(2, 10))) for _ in range(20_000)]
    vocabulary[50:60] = ["naïve", "größe", "東京", "<b>", "</b>", "x<y", "\n\n", "“quoted”", "\\frac{1}{2}", "\t"]
    return [vocabulary[i] for i in rng.zipf(1.3, size) % 20_000]


def write(path: Path, rows: int) -> dict[str, int]:
    """The JSONL file; returns how its rows must end."""
    rng = np.random.default_rng(3)
    pool = words_text(rng, 2_000_000)
    lengths = np.clip(rng.lognormal(np.log(MEAN_WORDS) - 0.32, 0.8, rows), 20, 8000).astype(int)
    starts, kinds = rng.integers(0, len(pool) - 8001, rows), rng.random(rows)
    turns = rng.choice([1, 1, 1, 2, 2], rows)
    expected = {"rows": rows, "kept": 0, "rejected": 0, "duplicates": 0}
    last = b""
    with path.open("wb", buffering=1 << 20) as file:
        for i in range(rows):
            if kinds[i] < 0.01 and last:
                expected["duplicates"] += 1
                file.write(last)
                continue
            line = make_line(i, pool[starts[i] : starts[i] + lengths[i]], int(turns[i]))
            if kinds[i] > 0.99:
                expected["rejected"] += 1
                file.write(broken(line, i))
                continue
            expected["kept"] += 1
            last = line
            file.write(line)
    return expected


def make_line(i: int, words: list[str], turns: int) -> bytes:
    """One row: a user and an assistant turn, `turns` times."""
    share, sharegpt = len(words) // (2 * turns) + 1, i % 4 == 0
    role, text = ("from", "value") if sharegpt else ("role", "content")
    names = ("human", "gpt") if sharegpt else ("user", "assistant")
    parts = [" ".join(words[k * share : (k + 1) * share]) for k in range(2 * turns)]
    parts[0] = f"{i} {parts[0]}"
    messages = [{role: names[k % 2], text: part} for k, part in enumerate(parts)]
    if i % 3 == 0:
        messages.insert(0, {role: "system", text: "You answer briefly."})
    return orjson.dumps({"id": f"row-{i}", "conversations" if sharegpt else "messages": messages}) + b"\n"


def broken(line: bytes, i: int) -> bytes:
    """A row that must be rejected."""
    if i % 3 == 0:
        return line[: len(line) // 2] + b"\n"
    if i % 3 == 1:
        return line.replace(b'"user"', b'"narrator"').replace(b'"human"', b'"narrator"')
    return line.replace(b'"user"', b'"assistant"').replace(b'"human"', b'"gpt"')


class Memory(threading.Thread):
    """Peak memory of this process and its children, in bytes: PSS, so that shared pages count once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._ended = 0, threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.2):
            self.peak = max(self.peak, self._now())

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return self.peak

    def _now(self) -> int:
        total, here = 0, psutil.Process()
        for process in [here, *here.children(recursive=True)]:
            try:
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                total += int(text.partition("\nPss:")[2].split()[0]) << 10
            except (psutil.Error, OSError, IndexError):
                continue
        return total


def cpu_seconds() -> float:
    """User and system time of this process and of children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a size for CI")
    parser.add_argument("--rows", type=int, default=900_000)
    parser.add_argument("--folder", type=Path, help="keep the file here and use it again")
    options = parser.parse_args()
    rows = 20_000 if options.small else options.rows
    with tempfile.TemporaryDirectory(prefix="bench-prompts-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        source, truth = folder / f"prompts-{rows}.jsonl", folder / f"prompts-{rows}.json"
        if not truth.exists():
            truth.write_text(json.dumps(write(source, rows)))
        measure(source, json.loads(truth.read_text()), Path(temporary) / "out")


def measure(source: Path, expected: dict[str, int], out: Path) -> None:
    """Run once, print the table and the JSON line."""
    size = source.stat().st_size
    settings = SourceSettings(paths=(str(source),))
    memory, start, cpu = Memory(), time.perf_counter(), cpu_seconds()
    memory.start()
    result = validate(settings, None, out)
    wall, used, peak = time.perf_counter() - start, cpu_seconds() - cpu, memory.stop()
    found = {name: getattr(result, name) for name in expected}
    rate, exact = size / 1e6 / used, found == expected
    print(f"{size / 1e6:,.0f} MB, {result.rows:,} rows: {wall:.1f} s wall, {used:.1f} s CPU on {os.cpu_count()} cores")
    print(f"{rate:.1f} MB/s a core (bar 40), {peak / 2**20:,.0f} MiB resident (bar 2,048), sums exact: {exact}")
    print({"found": found, "expected": expected, "reasons": dict(result.reasons)})
    line = {
        "bar": 6, "mb": round(size / 1e6), "rows": result.rows, "wall_s": round(wall, 2), "cpu_s": round(used, 2),
        "mb_s_a_core": round(rate, 1), "peak_mib": round(peak / 2**20), "exact": exact,
        "passed": exact and rate >= 40 and peak < 2 << 30,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
