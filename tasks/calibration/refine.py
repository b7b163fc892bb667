"""Where to look between measured levels. Pure functions over {concurrency: stats}; None: nothing is worth a window.

Between doublings a curve is interpolated by its shape instead of being halved blindly: a saturating engine is linear in
(1 / concurrency, 1 / throughput), a maximum is a parabola in log2(concurrency). One window replaces two or three.
"""

import math
from collections.abc import Mapping

from tasks.calibration.levels import LevelStats

Levels = Mapping[int, LevelStats]

RESOLUTION = 1.1
"""Levels closer than this ratio are not told apart: throughput there differs by less than the tolerance."""

GAP = 1.35
"""An interval wider than this ratio may hide a maximum."""

SMALL = 8
"""Below this many requests in flight nothing is saved by finding the exact start of a plateau."""

PROMISING = 0.85
"""A local maximum below this share of the best cannot hide the best within half a doubling."""

TARGET_MARGIN = 0.004
"""Aim this much above the tolerance, so that noise does not waste the window."""


def above_capacity(levels: Levels, fitting: Levels) -> int | None:
    """Between the highest level that fitted and one that did not: what the server really ran, else the middle."""
    top = max(fitting)
    refused = [c for c in levels if c > top]
    if not refused:
        return None
    upper = min(refused)
    ran = math.floor(levels[upper].running)
    if top < ran < upper:
        return ran if ran > 1.02 * top else None
    return middle(top, upper, RESOLUTION) if ran >= upper else None


def hidden_peak(fitting: Levels, noise: float) -> int | None:
    """Beside a local maximum behind which throughput drops: the vertex of a parabola, else the middle of the drop."""
    best = max(stats.tok_s for stats in fitting.values())
    order = list(fitting)
    for index in range(len(order) - 2, -1, -1):
        here, after = order[index], order[index + 1]
        stats, drop = fitting[here], 1 - fitting[after].tok_s / fitting[here].tok_s
        before = order[index - 1] if index else None
        rises = before is None or fitting[before].tok_s <= stats.tok_s
        if not rises or drop <= 0 or stats.tok_s < PROMISING * best:
            continue
        candidate = _vertex(fitting, before, here, after) if before else None
        if candidate is None and drop > max(0.03, 2 * noise):
            candidate = middle(here, after, GAP)
        if candidate is not None and _new(candidate, fitting):
            return candidate
    return None


def below(fitting: Levels, choice: int, target_tok_s: float, smooth: bool = False) -> int | None:
    """The smallest concurrency that should reach `target_tok_s`, between the choice and the next lower level.

    `smooth`: all levels lie on one saturating curve.
    """
    lower = [c for c in fitting if c < choice]
    if not lower:
        half = choice // 2
        return half if half >= 1 else None
    low = max(lower)
    slow, fast = 1 / fitting[low].tok_s, 1 / fitting[choice].tok_s
    if slow <= fast:
        return None
    wanted = 1 / (target_tok_s * (1 + TARGET_MARGIN))
    share = min(1.0, max(0.0, (slow - wanted) / (slow - fast)))
    candidate = math.ceil(1 / (1 / low + share * (1 / choice - 1 / low)))
    candidate = max(candidate, math.ceil(low * RESOLUTION))
    if candidate * RESOLUTION < choice and candidate > low:
        return candidate
    plateau = any(c > choice and stats.tok_s >= target_tok_s for c, stats in fitting.items())
    # A curve with a kink reaches its plateau before the shape of a smooth one would.
    return middle(low, choice, GAP) if plateau and not smooth and choice > SMALL else None


def ceiling(fitting: Levels, top: int, most: float) -> float:
    """Throughput that a curve which levels off would reach at `top`, from its shape; within [best measured, `most`].

    Stopping at a small gain leaves the sum of all smaller ones behind; the choice must not lose its tolerance on top.
    """
    best = max(stats.tok_s for stats in fitting.values())
    low, high = list(fitting)[-3:][0], max(fitting)
    if low == high or fitting[high].tok_s <= fitting[low].tok_s:
        return best
    slope = (1 / fitting[low].tok_s - 1 / fitting[high].tok_s) / (1 / low - 1 / high)
    inverse = 1 / fitting[high].tok_s - slope * (1 / high - 1 / top)
    return min(most, max(best, 1 / inverse)) if inverse > 0 else most


def middle(low: int, high: int, ratio: float) -> int | None:
    """The geometric middle of two levels, when they are further apart than `ratio`."""
    value = round(math.sqrt(low * high))
    return value if high / low > ratio and low < value < high else None


def _vertex(levels: Levels, low: int, mid: int, high: int) -> int | None:
    """Maximum of the parabola through three points in log2(concurrency), when it gains a per cent over the middle."""
    x0, x1, x2 = (math.log2(c) for c in (low, mid, high))
    y0, y1, y2 = (math.log(levels[c].tok_s) for c in (low, mid, high))
    first, second = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curvature = (second - first) / (x2 - x0)
    if curvature >= 0:
        return None
    x = (x0 + x1) / 2 - first / (2 * curvature)
    gain = curvature * (x - x0) * (x - x1) + first * (x - x0) + y0 - y1
    return round(2**x) if gain > 0.01 and x0 < x < x2 else None


def _new(candidate: int, levels: Levels) -> bool:
    return all(max(candidate / c, c / candidate) > RESOLUTION for c in levels)
