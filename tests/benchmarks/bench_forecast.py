"""Bar 10: forecast of a run's total time after 1 % of its prompts, over 200 simulated heavy-tailed runs.

Limits: the 90 % interval holds the truth in 85 to 95 % of the runs, its median width is <= 30 % of the value, the
median error is <= 10 %. Runs are SIMULATED (slots and lengths in numbers, no server): 30,000 to 300,000 prompts (the
mission has 902,087, which is easier), 32 to 256 slots; lengths log-normal, Lomax (power law), Weibull or a mixture of
short and thinking answers, cut at 32,768 tokens, mean about 1,800. Throughput saturates over requests in flight, is
measured with an error of 2 % and drifts. At the moment of the forecast up to half of the started answers are
unfinished. `done ÷ elapsed` is the naive estimate, for comparison. Rows by prompts show what few finished answers cost.

    python tests/benchmarks/bench_forecast.py [--small]
"""

import argparse
import heapq
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tasks.calibration.forecast import Rates, forecast, speed

CAP = 32_768
COVERAGE = (0.85, 0.95)
MOST_WIDTH = 0.30
MOST_ERROR = 0.10

Draw = Callable[[np.random.Generator, int], np.ndarray]
FAMILIES: dict[str, Draw] = {
    "log-normal 1.0": lambda rng, n: rng.lognormal(np.log(1100), 1.0, n),
    "log-normal 1.3": lambda rng, n: rng.lognormal(np.log(800), 1.3, n),
    "Lomax 2.5": lambda rng, n: 2700 * rng.pareto(2.5, n),
    "Weibull 0.6": lambda rng, n: 1200 * rng.weibull(0.6, n),
    "short and thinking": lambda rng, n: np.where(
        rng.random(n) < 0.7, rng.lognormal(np.log(300), 0.6, n), rng.lognormal(np.log(4000), 0.8, n)
    ),
}


@dataclass(frozen=True)
class Run:
    """One simulated run, and what is known when 1 % of it is done. Seconds."""

    finished: np.ndarray
    ages: np.ndarray
    remaining: int
    elapsed_s: float
    total_s: float
    rates: Rates


def simulate(draw: Draw, prompts: int, slots: int, rng: np.random.Generator, at: float = 0.01) -> Run:
    lengths = np.clip(np.ceil(draw(rng, prompts)), 1, CAP)
    half = slots / 2
    peak = 60.0 * slots * 1.5
    levels = np.unique(np.round(np.geomspace(4, slots, 6)))
    true = Rates(60.0 * slots, slots, tuple((float(c), peak * c / (c + half)) for c in np.arange(1, slots + 1)))
    ends = [(float(length), float(length), 0.0) for length in lengths[:slots]]
    heapq.heapify(ends)
    want, done, known = max(1, round(at * prompts)), [], None
    start = 0.0
    for length in lengths[slots:].tolist():
        start, ended, _ = ends[0]
        heapq.heapreplace(ends, (start + length, length, start))
        if known is None:
            done.append(ended)
            if len(done) == want:
                known = (start, np.array([max(0.0, start - begun) for _, _, begun in ends]))
    assert known is not None
    left = np.sort(np.array([end - start for end, _, _ in ends]))
    gaps = np.diff(left, prepend=0.0)
    drain = float((gaps / speed(np.arange(slots, 0, -1, dtype=float), true)).sum())
    later = float(np.exp(rng.normal(0, 0.02)))  # the throughput of the rest, relative to that of the first per cent
    elapsed = known[0] / 60.0
    total = elapsed + ((start - known[0]) / 60.0 + drain) / later
    measured = tuple((float(c), peak * c / (c + half) * float(np.exp(rng.normal(0, 0.02)))) for c in levels)
    rates = Rates(60.0 * slots * float(np.exp(rng.normal(0, 0.005))), slots, measured)
    return Run(np.array(done), known[1], prompts - want, elapsed, total, rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="25 runs of 100,000 prompts")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--at", type=float, default=0.01, help="share of the prompts that is done (the bar: 0.01)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    runs = 25 if arguments.small else arguments.runs
    sizes = [100_000] if arguments.small else [30_000, 100_000, 300_000]
    rows, names = [], list(FAMILIES)
    for index in range(runs):
        rng = np.random.default_rng([arguments.seed, index])
        name = names[index % len(names)]
        prompts, slots = sizes[(index // len(names)) % len(sizes)], int(rng.choice([32, 64, 128, 256]))
        run = simulate(FAMILIES[name], prompts, slots, rng, arguments.at)
        began = time.perf_counter()
        told = forecast(
            run.finished.tolist(), run.ages.tolist(), run.remaining, run.rates.tok_s, slots,
            max_tokens=CAP, rates=run.rates, seed=index,
        )  # fmt: skip
        took = time.perf_counter() - began
        assert told is not None
        median, low, high = (run.elapsed_s + value for value in told.time_s)
        naive = run.elapsed_s * prompts / len(run.finished)
        rows.append({
            "family": name, "prompts": prompts, "slots": slots, "covered": low <= run.total_s <= high,
            "width": (high - low) / run.total_s, "error": abs(median / run.total_s - 1),
            "bias": median / run.total_s - 1, "naive": abs(naive / run.total_s - 1), "seconds": took,
        })  # fmt: skip
    report(rows, arguments.at)


def report(rows: list[dict], at: float) -> None:
    print(f"{'simulated runs':24} {'n':>4} {'coverage':>8} {'width':>7} {'error':>7} {'bias':>7} {'naive error':>11}")
    groups = [("family", value) for value in FAMILIES] + [("prompts", v) for v in (30_000, 100_000, 300_000)]
    groups += [("slots", v) for v in (32, 64, 128, 256)]
    for key, value in groups:
        some = [row for row in rows if row[key] == value]
        if some:
            print(line(f"{key} {value}" if key != "family" else str(value), some))
    print(line("all", rows))
    coverage = float(np.mean([row["covered"] for row in rows]))
    width, error = (float(np.median([row[name] for row in rows])) for name in ("width", "error"))
    print(json.dumps({
        "bar": 10, "simulated": True, "runs": len(rows), "done_share": at,
        "coverage": round(coverage, 3), "coverage_limits": COVERAGE,
        "median_width": round(width, 4), "width_limit": MOST_WIDTH, "median_error": round(error, 4),
        "error_limit": MOST_ERROR, "naive_median_error": round(float(np.median([r["naive"] for r in rows])), 4),
        "forecast_s_median": round(float(np.median([r["seconds"] for r in rows])), 3),
        "passed": COVERAGE[0] <= coverage <= COVERAGE[1] and width <= MOST_WIDTH and error <= MOST_ERROR,
    }))  # fmt: skip


def line(label: str, rows: list[dict]) -> str:
    median = {name: float(np.median([row[name] for row in rows])) for name in ("width", "error", "bias", "naive")}
    covered = float(np.mean([row["covered"] for row in rows]))
    return (f"{label:24} {len(rows):4} {covered:8.3f} {median['width']:7.3f} {median['error']:7.3f} "
            f"{median['bias']:+7.3f} {median['naive']:11.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
