"""Bar 5: scan of a tokenized set like the incident's, from Parquet and from Arrow, against `datasets.map`.

What: 914,000 rows, 512 tokens each on average, int32 ids (Zipf), int8 masks; 87 % of the rows supervise 6 tokens of
which 4 are template scaffold. Counted for every row: lengths, mask values, ids against the vocabulary, supervised,
scaffold and content tokens, and a hash for exact duplicates. Page cache warm. Parquet: snappy, one row group 8,192
rows; once with dictionary pages (the default of pyarrow and datasets) and once plain. Arrow: a stream of 1,000-row
batches, as `save_to_disk` writes it. Each scan runs in a process of its own, whose peak resident memory and CPU time
are read from the kernel: on a machine that does nothing else, wall time is about CPU time ÷ 2. `datasets.map`
(unbatched, one process) makes the same judgement a row at a time, over `--map-rows` rows, and is scaled to all; beside
it stands the least that anybody does, `sum(loss_mask)`.

Bar: ≤ 3 s and < 1 GiB resident on 2 cores, ≥ 20 × datasets.map, exact counts.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tasks.target.counts import CountTables, count_many
from tasks.validation.plan import units
from tasks.validation.scan import scan_units
from tasks.validation.settings import SourceSettings
from tasks.validation.sources import resolve
from tasks.validation.tokenized import TokenRules

VOCAB = 248_320
THINK, CLOSE, END, BLANK = 248_068, 248_069, 248_046, 271
INCIDENT_TAIL = (BLANK, CLOSE, BLANK, 3793, 13, END)  # "\n\n</think>\n\nOK.<|im_end|>": 6 tokens, 4 of them scaffold
SCAFFOLD = frozenset({THINK, CLOSE, END, BLANK})
ROW_GROUP = 8192
MASK_ONLY = ["loss_mask.list.element"]
KINDS = {"parquet": "set.parquet", "parquet plain": "plain.parquet", "arrow": "set.arrow"}
SCHEMA = pa.schema([("input_ids", pa.large_list(pa.int32())), ("loss_mask", pa.large_list(pa.int8()))])


def tables() -> CountTables:
    """What a Qwen3.6 target counts as scaffold, without loading its tokenizer."""
    kinds = np.zeros(VOCAB, np.uint8)
    kinds[[THINK, CLOSE, END]] = 1
    kinds[[BLANK, 198]] = 2
    return CountTables(kinds, ())


def make_batch(rng: np.random.Generator, rows: int) -> tuple[pa.RecordBatch, np.ndarray]:
    """One batch, and the supervised counts it must give."""
    lengths = np.clip(rng.lognormal(6.11, 0.5, rows), 32, 4096).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ids = (rng.zipf(1.25, offsets[-1]) % 200_000 + 1000).astype(np.int32)
    mask = np.zeros(offsets[-1], np.int8)
    bad = rng.random(rows) < 0.87
    supervised = np.where(bad, len(INCIDENT_TAIL), np.minimum(lengths - 8, lengths * 3 // 4))
    ends = offsets[1:]
    for back, token in enumerate(reversed(INCIDENT_TAIL), start=1):
        ids[ends[bad] - back] = token
    steps = np.zeros(offsets[-1] + 1, np.int8)
    steps[ends - supervised] = 1
    steps[ends[:-1]] -= 1
    mask[:] = np.cumsum(steps[:-1], dtype=np.int64)
    arrays = [pa.LargeListArray.from_arrays(offsets, values) for values in (ids, mask)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA), supervised


def write(folder: Path, rows: int) -> dict[str, int]:
    """Both files; returns the right sums."""
    rng = np.random.default_rng(7)
    sums = {"rows": rows, "supervised": 0, "tokens": 0, "bad": 0}
    with (
        pq.ParquetWriter(folder / "set.parquet", SCHEMA, compression="snappy") as parquet,
        pq.ParquetWriter(folder / "plain.parquet", SCHEMA, compression="lz4", use_dictionary=MASK_ONLY) as plain,
        pa.OSFile(str(folder / "set.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, SCHEMA) as arrow,
    ):
        for start in range(0, rows, ROW_GROUP):
            batch, supervised = make_batch(rng, min(ROW_GROUP, rows - start))
            for writer in (parquet, plain):
                writer.write_table(pa.Table.from_batches([batch]), row_group_size=ROW_GROUP)
            for at in range(0, len(batch), 1000):
                arrow.write_batch(batch.slice(at, 1000))
            sums["supervised"] += int(supervised.sum())
            sums["tokens"] += len(batch.column(0).flatten())
            sums["bad"] += int((supervised == len(INCIDENT_TAIL)).sum())
    return sums


def scan_once(path: str) -> None:
    """In a process of its own: scan `path`, print what was found as JSON."""
    target = tables()
    rules = TokenRules(8, VOCAB, lambda values, offsets, mask: count_many(target, values, offsets, mask))
    settings = SourceSettings(paths=(path,))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    start, before = time.perf_counter(), usage.ru_utime + usage.ru_stime
    found = {"rows": 0, "tokens": 0, "supervised": 0, "bad": 0}
    for part in scan_units(units(resolve(settings, Path("unused")), settings), rules):
        found["rows"] += len(part.rows)
        found["tokens"] += int(part.n_tokens.sum())
        found["supervised"] += int(part.n_supervised.sum())
        found["bad"] += int(((part.n_supervised == 6) & (part.n_scaffold == 4) & (part.codes > 0)).sum())
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime - before
    print(json.dumps({**found, "seconds": seconds, "cpu_s": cpu, "peak_bytes": used.ru_maxrss << 10}))


def in_child(path: Path) -> dict[str, float]:
    """`scan_once` in a fresh interpreter."""
    command = [sys.executable, __file__, "--scan", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def least(row: dict[str, list[int]]) -> dict[str, int]:
    """What people write who only want to know the supervised tokens."""
    return {"n": sum(row["loss_mask"])}


def same(row: dict[str, list[int]]) -> dict[str, int]:
    """The judgement that the scan makes, for one row."""
    ids, mask = row["input_ids"], row["loss_mask"]
    supervised = [token for token, marked in zip(ids, mask, strict=False) if marked]
    return {
        "fine": len(ids) == len(mask) and set(mask) <= {0, 1} and min(ids) >= 0 and max(ids) < VOCAB,
        "supervised": len(supervised),
        "scaffold": sum(token in SCAFFOLD for token in supervised),
        "hash": hash(tuple(ids)),
    }


def datasets_map(path: Path, rows: int, judge: Callable[[dict[str, list[int]]], dict[str, int]]) -> float:
    """Rows a second of `Dataset.map` over the first `rows` rows."""
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()
    table = pq.ParquetFile(path).read_row_groups(range(max(1, min(rows // ROW_GROUP, 64))))
    data = datasets.Dataset(datasets.table.InMemoryTable(table.slice(0, rows)))
    start = time.perf_counter()
    data.map(judge, remove_columns=data.column_names)
    return len(data) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a size for CI")
    parser.add_argument("--rows", type=int, default=914_000)
    parser.add_argument("--map-rows", type=int, default=16_384)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the files here and use them again")
    parser.add_argument("--scan", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scan:
        scan_once(options.scan)
        return
    rows = 40_000 if options.small else options.rows
    with tempfile.TemporaryDirectory(prefix="bench-scan-") as temporary:
        folder = options.folder or Path(temporary)
        report(folder, rows, 2048 if options.small else options.map_rows, 1 if options.small else options.repeat)


def report(folder: Path, rows: int, map_rows: int, repeat: int) -> None:
    """Measure, print the table and the JSON line."""
    expected_path = folder / f"expected-{rows}.json"
    if not expected_path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        expected_path.write_text(json.dumps(write(folder, rows)))
    expected = json.loads(expected_path.read_text())
    result: dict[str, object] = {"bar": 5, **expected, "cores": os.cpu_count()}
    least_rate, map_rate = (datasets_map(folder / "set.parquet", map_rows, judge) for judge in (least, same))
    print(f"{'what':<28}{'seconds':>9}{'CPU s':>8}{'rows/s':>12}{'peak MiB':>10}{'× map':>8}  exact")
    for name, rate in (("datasets.map, same", map_rate), ("datasets.map, sum(mask)", least_rate)):
        print(f"{name + ' (scaled)':<36}{rows / rate:>8.1f}{rate:>13,.0f}")
    for kind, path in KINDS.items():
        path = folder / path
        runs = [in_child(path) for _ in range(repeat)]
        seconds = float(np.median([run["seconds"] for run in runs]))
        peak = max(run["peak_bytes"] for run in runs) / 2**20
        exact = all(run[name] == expected[name] for run in runs for name in ("rows", "tokens", "supervised", "bad"))
        ratio = rows / seconds / map_rate
        cpu = float(np.median([run["cpu_s"] for run in runs]))
        print(f"{kind:<28}{seconds:>9.2f}{cpu:>8.2f}{rows / seconds:>12,.0f}{peak:>10.0f}{ratio:>8.0f}  {exact}")
        result[kind] = {
            "seconds": round(seconds, 3),
            "cpu_s": round(cpu, 2),
            "peak_mib": round(peak),
            "times_map": round(ratio, 1),
            "times_map_sum": round(rows / seconds / least_rate, 1),
            "exact": exact,
            "file_mb": round(path.stat().st_size / 1e6),
            "passed": exact and (rows < 900_000 or (ratio >= 20 and seconds <= 3 and peak < 1024)),
        }
    result |= {"map_rows_per_s": round(map_rate), "map_sum_rows_per_s": round(least_rate)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
