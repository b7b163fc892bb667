"""Borrowing strength between levels: when a saturating curve explains all of them within their noise, trust it more.

T(C) = P * C / (C + h), throughput against requests in flight: P tokens/s at saturation, half of it at h. It is linear
as C / T = (C + h) / P, so two parameters come from weighted least squares (relative errors of equal size). Where the
shape does not fit (humps, dips, plateaus with a kink) levels keep what was measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tasks.calibration.levels import LevelStats, relative_error

Levels = Mapping[int, LevelStats]

MOST_MISFIT = 2.0
"""Residuals up to this multiple of the noise are believed to be noise (the 95 % point of F with 4 and 6 degrees)."""

LEAST_LEVELS = 4


@dataclass(frozen=True, slots=True)
class Saturation:
    """A fitted curve; `variance` is the relative variance of its values, misfit included."""

    peak_tok_s: float
    half: float
    variance: float

    def tok_s(self, concurrency: float) -> float:
        """Throughput at `concurrency` in flight, tokens per second."""
        return self.peak_tok_s * concurrency / (concurrency + self.half)


def fit(levels: Levels, sd: float, unit_s: float) -> Saturation | None:
    """The saturating curve through `levels`, or None where it does not explain them within the noise `sd`."""
    if len(levels) < LEAST_LEVELS:
        return None
    c = np.array(list(levels), dtype=float)
    t = np.array([stats.tok_s for stats in levels.values()])
    sigma = np.array([relative_error(stats, sd, unit_s) for stats in levels.values()])
    y = c / t
    weights = 1 / (y * sigma)
    design = np.column_stack([np.ones_like(c), c]) * weights[:, None]
    (intercept, slope), *_ = np.linalg.lstsq(design, y * weights, rcond=None)
    if slope <= 0 or intercept < 0:
        return None
    fitted = c / (intercept + slope * c)
    freedom = len(c) - 2
    chi = float(np.sum(((t / fitted - 1) / sigma) ** 2) / freedom)
    if chi > MOST_MISFIT**2:
        return None
    base = float(np.mean(sigma**2))
    return Saturation(1 / slope, intercept / slope, base * (2 / len(c) + max(0.0, chi - 1)))


def smoothed(levels: Levels, sd: float, unit_s: float) -> tuple[dict[int, LevelStats], Saturation | None]:
    """Levels with tok/s moved towards the fitted curve as far as their own noise exceeds the curve's."""
    curve = fit(levels, sd, unit_s)
    if curve is None:
        return dict(levels), None
    result = {}
    for level, stats in levels.items():
        own = relative_error(stats, sd, unit_s) ** 2
        share = curve.variance / (curve.variance + own)
        result[level] = replace(stats, tok_s=share * stats.tok_s + (1 - share) * curve.tok_s(level))
    return result, curve


def error_after(stats: LevelStats, curve: Saturation | None, sd: float, unit_s: float) -> float:
    """Relative standard error of a level's tok/s once the curve's information is added."""
    own = relative_error(stats, sd, unit_s)
    if curve is None or own == 0:
        return own
    return math.sqrt(1 / (1 / own**2 + 1 / max(curve.variance, 1e-12)))
