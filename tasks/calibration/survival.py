"""The distribution of answer lengths from finished and unfinished answers.

Early in a run the finished answers are the short ones. Each answer that is still being written says "longer than this":
it is right-censored at its age in tokens, and starting times do not depend on lengths, so the product-limit estimator
(Kaplan and Meier 1958) is consistent. Uncertainty is the Bayesian bootstrap (Rubin 1981): each replicate draws
Gamma(count) weights. Beyond where enough answers are at risk, the tail continues along a generalised Pareto law, the
limit law of excesses over a high threshold (Pickands 1975), fitted to the censored excesses; each replicate draws its
parameters from their asymptotic normal law, so that not knowing the tail widens the interval.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize

Array = npt.NDArray[np.float64]

MOST_BINS = 1500
"""Distinct lengths kept; more are merged at quantiles. Merging moves a length by less than 0.1 % of the others."""

LEAST_AT_RISK = 20.0
"""The product-limit estimate is used while at least this many answers are that long."""

TAIL_ANSWERS = 40
TAIL_SHARE = 0.1
"""Finished answers that the tail is fitted to: this many, or this share of all, whichever is more."""

SHAPE_MEAN = 0.4
SHAPE_SD = 0.25
"""Prior of the tail's shape, from exponential (0) to a power law without variance (0.5 and more). At the thresholds
that 1 % of a run allows, log-normal and Weibull lengths look like this; the output limit bounds all of them."""

GRID = 700
"""Points of the length axis that replicates are evaluated on."""

UNCAPPED_FACTOR = 60.0
"""Without an output limit the axis ends at this multiple of the mean finished length."""


@dataclass(frozen=True, slots=True)
class Survival:
    """Replicates of S(x) = P(length > x) on a common grid of lengths in tokens. `values`: replicates x grid."""

    grid: Array
    values: Array

    def mean(self) -> Array:
        """Mean length of each replicate: the integral of S."""
        return np.asarray(np.trapezoid(self.values, self.grid, axis=1))

    def variance(self) -> Array:
        """Variance of one length, of each replicate: 2 * integral of x S - mean^2."""
        second = 2 * np.trapezoid(self.grid * self.values, self.grid, axis=1)
        return np.maximum(0.0, second - self.mean() ** 2)

    def residual(self) -> Array:
        """Distribution function of the remaining length of an answer met at random (equilibrium law), by replicate."""
        steps = np.diff(self.grid) * (self.values[:, 1:] + self.values[:, :-1]) / 2
        total = np.concatenate([np.zeros((len(steps), 1)), np.cumsum(steps, axis=1)], axis=1)
        return np.asarray(total / np.maximum(total[:, -1:], 1e-12))


def estimate(
    lengths: Sequence[float],
    censored: Sequence[float],
    cap: float | None,
    replicates: int,
    rng: np.random.Generator,
    weight: float = 1.0,
) -> Survival:
    """Replicates of the survival function of output lengths (tokens); `cap` is the output limit of an answer.

    `weight`: finished answers that each of `lengths` stands for, when they are a sample and `censored` is complete.
    """
    times, deaths, counts = binned(np.asarray(lengths, float), np.asarray(censored, float))
    counts = np.where(deaths, counts * weight, counts)
    top = cap if cap else UNCAPPED_FACTOR * max(1.0, float(np.mean(lengths)))
    top = max(top, float(times[-1]) * (1.0 + 1e-9))
    grid = np.concatenate([[0.0], np.geomspace(1.0, top, GRID)])
    weights = rng.standard_gamma(np.broadcast_to(counts, (replicates, len(counts))))
    risk = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    hazard = np.where(deaths, weights / np.maximum(risk, 1e-12), 0.0)
    steps = np.cumprod(1 - np.minimum(hazard, 1.0), axis=1)
    index = np.searchsorted(times, grid, side="right") - 1
    body = np.where(index >= 0, steps[:, np.maximum(index, 0)], 1.0)
    values = _with_tail(grid, body, (times, deaths, counts), cap, rng)
    if cap:
        values[:, -1] = 0.0
    return Survival(grid, values)


def binned(lengths: Array, ages: Array) -> tuple[Array, npt.NDArray[np.bool_], Array]:
    """Sorted (time, finished?, count); finished before censored at equal times, as the estimator wants it."""
    lengths, ages = np.maximum(lengths, 1.0), ages[ages > 0]
    parts = [(*_merge(lengths), True), (*_merge(ages), False)]
    times = np.concatenate([part[0] for part in parts])
    counts = np.concatenate([part[1] for part in parts])
    deaths = np.concatenate([np.full(len(part[0]), part[2]) for part in parts])
    order = np.lexsort((~deaths, times))
    return times[order], deaths[order], counts[order]


def _merge(values: Array) -> tuple[Array, Array]:
    unique, counts = np.unique(values, return_counts=True)
    if len(unique) <= MOST_BINS:
        return unique, counts.astype(float)
    edges = np.unique(np.quantile(values, np.linspace(0, 1, MOST_BINS)))
    index = np.searchsorted(edges, values, side="left")
    sums = np.bincount(index, weights=values, minlength=len(edges))
    counts = np.bincount(index, minlength=len(edges))
    keep = counts > 0
    return sums[keep] / counts[keep], counts[keep].astype(float)


def _with_tail(
    grid: Array,
    body: Array,
    data: tuple[Array, npt.NDArray[np.bool_], Array],
    cap: float | None,
    rng: np.random.Generator,
) -> Array:
    """Replace S beyond the last supported length by a generalised Pareto tail, scaled to join there."""
    times, deaths, counts = data
    at_risk = np.cumsum(counts[::-1])[::-1]
    enough = at_risk >= LEAST_AT_RISK
    join = float(times[enough][-1]) if enough.any() else 0.0
    at = max(0, int(np.searchsorted(grid, join, side="right")) - 1)
    tail = fit_tail(times, deaths, counts, cap) if at < len(grid) - 1 else None
    if tail is None:
        return body
    beyond = tail.survival(grid[at:], tail.draw(len(body), rng))
    result = body.copy()
    result[:, at:] = body[:, at : at + 1] * beyond / np.maximum(beyond[:, :1], 1e-300)
    return result


@dataclass(frozen=True, slots=True)
class Tail:
    """Excesses over `threshold` tokens: generalised Pareto with (log scale, shape), and their covariance."""

    threshold: float
    parameters: Array
    covariance: Array

    def draw(self, size: int, rng: np.random.Generator) -> Array:
        """Parameters from their asymptotic normal law: size x 2."""
        return rng.multivariate_normal(self.parameters, self.covariance, size=size, method="eigh")

    def survival(self, x: Array, parameters: Array) -> Array:
        """S of the excess for each row of parameters; 1 below the threshold."""
        excess = np.maximum(0.0, x - self.threshold)[None, :]
        return np.exp(_log_survival(excess, np.exp(parameters[:, :1]), parameters[:, 1:]))


def fit_tail(times: Array, deaths: npt.NDArray[np.bool_], counts: Array, cap: float | None) -> Tail | None:
    """Penalised maximum likelihood on what exceeds a high threshold; None where too little has finished.

    Answers cut at the output limit count as "at least that long", as those in flight do.
    """
    finished = deaths & (times < cap) if cap else deaths
    ended = np.cumsum((counts * finished)[::-1])[::-1]
    if ended[0] < 5:
        return None
    wanted = min(ended[0], max(TAIL_ANSWERS, TAIL_SHARE * ended[0]))
    threshold = float(times[int(np.flatnonzero(ended >= wanted)[-1])]) * (1 - 1e-9)
    over = times > threshold
    excess, ends, weight = times[over] - threshold, finished[over], counts[over]

    def loss(parameters: Array) -> float:
        scale, shape = math.exp(min(float(parameters[0]), 50.0)), float(parameters[1])
        survival = _log_survival(excess, np.array(scale), np.array(shape))
        density = survival * (1 + shape) - parameters[0]
        value = -float(np.sum(weight * np.where(ends, density, survival)))
        value += 0.5 * ((shape - SHAPE_MEAN) / SHAPE_SD) ** 2
        return value if math.isfinite(value) else 1e12

    mean = float(np.sum(weight * excess) / max(1.0, float(weight[ends].sum())))
    start = np.array([math.log(max(mean, 1.0)), SHAPE_MEAN])
    found = optimize.minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-3})
    covariance = _covariance(loss, found.x)
    return None if covariance is None else Tail(threshold, found.x, covariance)


def _log_survival(excess: Array, scale: Array, shape: Array) -> Array:
    """log S of the generalised Pareto law; -inf beyond its end point when the shape is negative."""
    shape = np.where(np.abs(shape) < 1e-6, 1e-6, shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = 1 + shape * excess / scale
        return np.asarray(np.where(inside > 0, -np.log(np.maximum(inside, 1e-300)) / shape, -np.inf))


def _covariance(loss: Callable[[Array], float], at: Array, step: float = 0.01) -> Array | None:
    """Inverse of the Hessian of the negative log likelihood by central differences; None where it is not convex."""
    offsets = np.eye(2) * step
    hessian = np.empty((2, 2))
    for i in range(2):
        for j in range(2):
            up, down = offsets[i] + offsets[j], offsets[i] - offsets[j]
            hessian[i, j] = (loss(at + up) - loss(at + down) - loss(at - down) + loss(at - up)) / (4 * step**2)
    try:
        covariance = np.linalg.inv((hessian + hessian.T) / 2)
    except np.linalg.LinAlgError:
        return None
    return np.asarray(covariance, float) if np.all(np.linalg.eigvalsh(covariance) > 0) else None
