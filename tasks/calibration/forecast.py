"""What is left, and when it ends: median and 90 % interval of tokens, seconds, energy and cost.

Not done/elapsed: the first answers to finish are the short ones, so that is biased until the end. Lengths come from
survival.py. Time is work over throughput while every slot is busy, plus the drain: once no prompt waits, the requests
in flight are answers met at random (long ones over-represented), and the last of them ends alone.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.calibration.survival import Survival, estimate
from tasks.records import Forecast

Array = npt.NDArray[np.float64]
Interval = tuple[float, float, float]

REPLICATES = 400
QUANTILES = (0.5, 0.05, 0.95)
"""Median, low, high: the order of every interval in the records."""

TOK_S_SD = 0.02
"""Relative uncertainty of the throughput of hours to come, measured in minutes: contexts lengthen, clocks sink."""

WIDEN = 1.08
"""Intervals are widened by this power around the median: over 300 simulated heavy-tailed runs (seeds other than the
benchmark's) the bootstrap's 90 % intervals held the truth in 88 %; the longest answers are those not yet seen."""

SAMPLED = 10_000
"""From this many lengths on they are taken for a sample of all that finished; fewer may lack those of earlier runs."""

EXACT_PENDING = 3
"""Below this many waiting prompts a slot, slots are simulated one by one; above, the equilibrium law holds."""

J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast and at what price. Tokens/s and watts of the whole fleet; prices in one currency.

    `curve`: (requests in flight over the fleet, tokens/s) as calibrated, for the drain; empty: each request keeps its
    speed. `tok_s_sd` is relative.
    """

    tok_s: float
    concurrency: int
    curve: tuple[tuple[float, float], ...] = ()
    tok_s_sd: float = TOK_S_SD
    power_w: float | None = None
    gpus: int = 0
    price_per_gpu_hour: float | None = None
    price_per_kwh: float | None = None


def forecast(
    lengths: Sequence[float],
    censored: Sequence[float],
    remaining: int,
    tok_s: float,
    concurrency_total: int,
    *,
    max_tokens: int | None = None,
    rates: Rates | None = None,
    replicates: int = REPLICATES,
    finished: int | None = None,
    seed: int = 0,
) -> Forecast | None:
    """Forecast of `remaining` prompts without an answer, `len(censored)` of which are in flight.

    `lengths`: output tokens of finished prompts; `censored`: output tokens so far of those in flight. None while
    nothing has finished or the throughput is unknown: no number is better than a made-up one. `finished`: how many
    have finished, when `lengths` is a sample of them.
    """
    rates = rates or Rates(tok_s, concurrency_total)
    if not len(lengths) or tok_s <= 0 or concurrency_total < 1:
        return None if remaining > 0 else _finished(rates)
    if remaining <= 0:
        return _finished(rates)
    rng = np.random.default_rng(seed)
    ages = np.asarray(censored, float)[:remaining]
    weight = max(1.0, (finished or 0) / len(lengths)) if len(lengths) >= SAMPLED else 1.0
    survival = estimate(lengths, list(ages), max_tokens, replicates, rng, weight)
    pending = remaining - len(ages)
    residuals = _residuals(survival, ages, rng)
    if pending <= EXACT_PENDING * concurrency_total:
        tokens, seconds = _simulated(survival, residuals, pending, rates, rng)
    else:
        tokens, seconds = _balanced(survival, residuals, pending, rates, rng)
    seconds = _widened(seconds * np.exp(rng.normal(0.0, rates.tok_s_sd, len(seconds))))
    tokens = _widened(tokens)
    return _result(remaining, tokens, seconds, rates)


def total(forecast: Forecast, elapsed_s: float) -> Interval:
    """Whole duration from the start: seconds gone plus what remains."""
    median, low, high = forecast.time_s
    return median + elapsed_s, low + elapsed_s, high + elapsed_s


def _residuals(survival: Survival, ages: Array, rng: np.random.Generator) -> Array:
    """Tokens still to come of each answer in flight: replicates x answers, drawn from S given its age."""
    result = np.empty((len(survival.values), len(ages)))
    for row, values in enumerate(survival.values):
        at_age = np.interp(ages, survival.grid, values)
        result[row] = np.maximum(0.0, _quantile(survival.grid, values, rng.random(len(ages)) * at_age) - ages)
    return result


def _quantile(grid: Array, values: Array, u: Array) -> Array:
    """Length x with S(x) = u."""
    return np.interp(u, values[::-1], grid[::-1])


def _balanced(
    survival: Survival, residuals: Array, pending: int, rates: Rates, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Many prompts wait: work balance up to the last start, then the drain of an equilibrium of residual lengths."""
    mean, spread = survival.mean(), np.sqrt(survival.variance() * pending)
    tokens = residuals.sum(axis=1) + np.maximum(0.0, pending * mean + spread * rng.normal(size=len(mean)))
    laws = survival.residual()
    drain = np.array([np.interp(rng.random(rates.concurrency), law, survival.grid) for law in laws])
    busy = np.maximum(0.0, tokens - drain.sum(axis=1)) / rates.tok_s
    return tokens, busy + drain_s(drain, rates)


def _simulated(
    survival: Survival, residuals: Array, pending: int, rates: Rates, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Few prompts wait: every slot is followed. Equal speed of all slots makes tokens the clock."""
    tokens, busy, left = [], [], []
    for row, values in enumerate(survival.values):
        fresh = _quantile(survival.grid, values, rng.random(pending))
        slots = np.zeros(max(rates.concurrency, residuals.shape[1]))
        slots[: residuals.shape[1]] = residuals[row]
        ends = slots.tolist()
        heapq.heapify(ends)
        start = 0.0
        for length in fresh.tolist():
            start = ends[0]
            heapq.heapreplace(ends, start + length)
        tokens.append(float(fresh.sum() + residuals[row].sum()))
        busy.append(start * len(ends) / rates.tok_s)
        left.append(np.maximum(0.0, np.array(ends) - start))
    return np.array(tokens), np.array(busy) + drain_s(np.array(left), rates)


def drain_s(left: Array, rates: Rates) -> Array:
    """Seconds until every request has ended when none is started any more. `left`: replicates x slots, tokens."""
    order = np.sort(left, axis=1)
    gaps = np.diff(order, axis=1, prepend=0.0)
    running = np.arange(order.shape[1], 0, -1, dtype=float)
    return np.asarray((gaps / speed(running, rates)).sum(axis=1))


def speed(running: Array, rates: Rates) -> Array:
    """Tokens per second of one request when `running` are in flight over the fleet."""
    full = rates.tok_s / rates.concurrency
    points = sorted((c, t / c) for c, t in rates.curve if c > 0 and t > 0)
    if not points:
        return np.full(len(running), full)
    at, each = np.array([c for c, _ in points]), np.array([v for _, v in points])
    scale = full / np.interp(np.log(rates.concurrency), np.log(at), each)
    return np.asarray(np.interp(np.log(running), np.log(at), each) * scale)


def _result(remaining: int, tokens: Array, seconds: Array, rates: Rates) -> Forecast:
    energy = None if rates.power_w is None else seconds * rates.power_w / J_PER_KWH
    cost = None
    if rates.price_per_gpu_hour is not None and rates.gpus:
        cost = seconds / 3600 * rates.gpus * rates.price_per_gpu_hour
    if rates.price_per_kwh is not None and energy is not None:
        cost = (0.0 if cost is None else cost) + energy * rates.price_per_kwh
    return Forecast(
        remaining_prompts=remaining,
        tokens=_interval(tokens),
        time_s=_interval(seconds),
        tok_s=rates.tok_s,
        energy_kwh=None if energy is None else _interval(energy),
        cost=None if cost is None else _interval(cost),
    )


def _interval(values: Array) -> Interval:
    median, low, high = np.quantile(values, QUANTILES)
    return float(median), float(low), float(high)


def _widened(values: Array) -> Array:
    median = float(np.median(values))
    return median * (np.maximum(values, 1e-9) / median) ** WIDEN if median > 0 else values


def _finished(rates: Rates) -> Forecast:
    none = (0.0, 0.0, 0.0)
    priced = rates.price_per_gpu_hour is not None or rates.price_per_kwh is not None
    return Forecast(0, none, none, rates.tok_s, none if rates.power_w is not None else None, none if priced else None)
