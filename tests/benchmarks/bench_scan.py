"""Bar 5: scan of a tokenized set like the incident's, from Parquet and from Arrow, against `datasets.map`.

What: 914,000 rows, 512 tokens each on average, int32 ids (Zipf), int8 masks; 87 % of the rows supervise 6 tokens of
which 4 are template scaffold. Counted for every row: lengths, mask values, ids against the vocabulary, supervised,
scaffold and content tokens, and a hash for exact duplicates. Page cache warm. Parquet: snappy, one row group 8,192
rows. Arrow: a stream of 1,000-row batches, as `save_to_disk` writes it. Each scan runs in a process of its own,
whose peak resident memory is read from the kernel. `datasets.map` (unbatched, one process, the usual
`sum(loss_mask)`) runs over `--map-rows` rows and is scaled to all.

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
ROW_GROUP = 8192
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
        pa.OSFile(str(folder / "set.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, SCHEMA) as arrow,
    ):
        for start in range(0, rows, ROW_GROUP):
            batch, supervised = make_batch(rng, min(ROW_GROUP, rows - start))
            parquet.write_table(pa.Table.from_batches([batch]), row_group_size=ROW_GROUP)
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
    start = time.perf_counter()
    found = {"rows": 0, "tokens": 0, "supervised": 0, "bad": 0}
    for part in scan_units(units(resolve(settings, Path("unused")), settings), rules):
        found["rows"] += len(part.rows)
        found["tokens"] += int(part.n_tokens.sum())
        found["supervised"] += int(part.n_supervised.sum())
        found["bad"] += int(((part.n_supervised == 6) & (part.n_scaffold == 4) & (part.codes > 0)).sum())
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({**found, "seconds": seconds, "peak_bytes": peak}))


def in_child(path: Path) -> dict[str, float]:
    """`scan_once` in a fresh interpreter."""
    command = [sys.executable, __file__, "--scan", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def datasets_map(path: Path, rows: int) -> float:
    """Rows a second of `Dataset.map` over the first `rows` rows."""
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()
    table = pq.ParquetFile(path).read_row_groups(range(max(1, min(rows // ROW_GROUP, 64))))
    data = datasets.Dataset(datasets.table.InMemoryTable(table.slice(0, rows)))
    start = time.perf_counter()
    data.map(lambda row: {"n": sum(row["loss_mask"])}, remove_columns=data.column_names)
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
        report(folder, rows, 4096 if options.small else options.map_rows, options.repeat)


def report(folder: Path, rows: int, map_rows: int, repeat: int) -> None:
    """Measure, print the table and the JSON line."""
    expected_path = folder / f"expected-{rows}.json"
    if not expected_path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        expected_path.write_text(json.dumps(write(folder, rows)))
    expected = json.loads(expected_path.read_text())
    result: dict[str, object] = {"bar": 5, **expected, "cores": os.cpu_count()}
    map_rate = datasets_map(folder / "set.parquet", map_rows)
    print(f"{'what':<22}{'seconds':>9}{'rows/s':>12}{'peak MiB':>10}{'× map':>8}  exact")
    print(f"{'datasets.map (scaled)':<22}{rows / map_rate:>9.1f}{map_rate:>12,.0f}")
    for kind in ("parquet", "arrow"):
        path = folder / f"set.{kind}"
        runs = [in_child(path) for _ in range(repeat)]
        seconds = float(np.median([run["seconds"] for run in runs]))
        peak = max(run["peak_bytes"] for run in runs) / 2**20
        exact = all(run[name] == expected[name] for run in runs for name in ("rows", "tokens", "supervised", "bad"))
        ratio = rows / seconds / map_rate
        print(f"{kind:<22}{seconds:>9.2f}{rows / seconds:>12,.0f}{peak:>10.0f}{ratio:>8.0f}  {exact}")
        result[kind] = {
            "seconds": round(seconds, 3), "peak_mib": round(peak), "times_map": round(ratio, 1), "exact": exact,
            "file_mb": round(path.stat().st_size / 1e6),
            "passed": exact and ratio >= 20 and (rows < 900_000 or (seconds <= 3 and peak < 1024)),
        }  # fmt: skip
    result["map_rows_per_s"] = round(map_rate)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
