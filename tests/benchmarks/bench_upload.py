"""Bar 8: our verified upload against the plain boto3 transfer of the same bytes to the same server, with checksums.

Limits: >= 0.95 x boto3's throughput (median of alternating pairs), resident memory independent of the file's size, and
an upload that is killed with SIGKILL and resumed sends no byte twice but the parts that were open.

What is compared: `open_store(...).put_file` (SHA-256 of the file, CRC64NVME a part and for the whole object, size and
digest re-read) with `boto3.client.upload_file(..., ChecksumAlgorithm=CRC64NVME)` at boto3's default of 10 threads. The
server is SeaweedFS from its wheel, in a folder of its own. Example: python tests/benchmarks/bench_upload.py --small
"""

import argparse
import json
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

from s3_faults import proxy  # noqa: E402
from s3_servers import BUCKET, S3Server, client_of, seaweed  # noqa: E402
from tasks.storage import open_store  # noqa: E402
from tasks.storage.s3_multipart import WORKERS  # noqa: E402

PART_MB = 8
KILL_PART_MB = 5


def make_file(path: Path, megabytes: int) -> Path:
    """Random bytes: nothing on the way can compress them."""
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1 << 20))
    return path


def open_ours(endpoint_url: str, credentials: dict, part_mb: int = PART_MB):
    """The store, as a run opens it once."""
    return open_store(f"s3://{BUCKET}/ours", endpoint_url=endpoint_url, credentials=credentials, part_mb=part_mb)


def ours(endpoint_url: str, credentials: dict, key: str, path: Path, part_mb: int = PART_MB) -> None:
    """One verified upload, from a process of its own."""
    open_ours(endpoint_url, credentials, part_mb).put_file(key, path)


def timed(call, *arguments) -> float:
    """Seconds."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def _memory(endpoint_url: str, credentials: dict, path: str, queue) -> None:
    ours(endpoint_url, credentials, f"memory-{Path(path).name}", Path(path))
    queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def peak_mb(server: S3Server, path: Path) -> float:
    """Peak resident memory of a process of its own that uploads `path`."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_memory, args=(server.endpoint_url, server.credentials, str(path), queue))
    process.start()
    peak = queue.get(timeout=300)
    process.join()
    return float(peak)


def kill_and_resume(server: S3Server, path: Path) -> dict[str, float]:
    """SIGKILL in mid-upload, then the same call: bytes that arrived, against the file's size."""
    size = path.stat().st_size
    with proxy(server.endpoint_url) as network:
        arguments = (network.url, server.credentials, "killed", path, KILL_PART_MB)
        process = multiprocessing.get_context("spawn").Process(target=ours, args=arguments)
        process.start()
        while sum("partNumber" in s.query for s in network.seen) < (size >> 20) // KILL_PART_MB // 2:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        time.sleep(0.5)
        first = [s.query["partNumber"] for s in network.seen if "partNumber" in s.query]
        network.seen.clear()
        ours(*arguments)
        second = [s.query["partNumber"] for s in network.seen if "partNumber" in s.query]
    journal = path.with_name(f".{path.name}.upload")
    twice = len(set(first) & set(second))
    return {"sent_before": len(first), "sent_after": len(second), "sent_twice": twice, "left": float(journal.exists())}


def main() -> None:
    """Run, print a table, then one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small size for CI")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--mb", type=int, default=512)
    options = parser.parse_args()
    megabytes, pairs = (48, 1) if options.small else (options.mb, options.pairs)
    with tempfile.TemporaryDirectory() as folder, seaweed(Path(folder) / "weed") as server:
        path = make_file(Path(folder) / "file.bin", megabytes)
        store, client = open_ours(server.endpoint_url, server.credentials), client_of(server)
        extra = {"ExtraArgs": {"ChecksumAlgorithm": "CRC64NVME"}}
        warm = make_file(Path(folder) / "warm.bin", 24)
        store.put_file("warm", warm)
        client.upload_file(str(warm), BUCKET, "plain/warm", **extra)
        rows = []
        for pair in range(pairs):
            order = [
                ("ours", lambda n=pair: store.put_file(f"f{n}", path)),
                ("boto3", lambda n=pair: client.upload_file(str(path), BUCKET, f"plain/f{n}", **extra)),
            ]
            took = {name: timed(call) for name, call in (order if pair % 2 == 0 else order[::-1])}
            rows.append(took)
            speed = {name: megabytes / seconds for name, seconds in took.items()}
            print(f"pair {pair}: ours {speed['ours']:7.1f} MiB/s   boto3 {speed['boto3']:7.1f} MiB/s", flush=True)
            for prefix in ("ours", "plain"):
                client.delete_object(Bucket=BUCKET, Key=f"{prefix}/f{pair}")
        small = peak_mb(server, make_file(Path(folder) / "quarter.bin", max(megabytes // 4, 16)))
        large = peak_mb(server, path)
        resumed = kill_and_resume(server, path)
    ratio = statistics.median(row["boto3"] / row["ours"] for row in rows)
    result = {
        "bar": 8,
        "megabytes": megabytes,
        "ratio": round(ratio, 3),
        "ours_mib_s": round(megabytes / statistics.median(r["ours"] for r in rows), 1),
        "boto3_mib_s": round(megabytes / statistics.median(r["boto3"] for r in rows), 1),
        "peak_mb_quarter": round(small, 1),
        "peak_mb_full": round(large, 1),
        **{f"resume_{name}": value for name, value in resumed.items()},
        "workers": WORKERS,
        "passed": ratio >= 0.95 and large - small < 40 and resumed["sent_twice"] <= WORKERS and not resumed["left"],
    }
    print(
        f"ratio {ratio:.3f} (limit 0.95), peak {small:.0f} MB for a quarter, {large:.0f} MB for the whole (limit +40)"
    )
    print(
        f"killed after {resumed['sent_before']} parts, resumed with {resumed['sent_after']}, "
        f"sent twice {resumed['sent_twice']} (limit: the {WORKERS} that were open)"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
