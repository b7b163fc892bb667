"""SIMULATED servers for calibration: throughput curves in simulated seconds, no sleeping, no tokens.

A `CurveDriver` implements LoadDriver on curves. Its clock charges what a real one costs: prompts are read before a
steady state, and going down in concurrency waits until enough answers have ended.
"""

import itertools
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tasks.records import LoadWindow

MEAN_TOKENS = 1800
"""Output tokens of an answer; the incident's mean (1.64 billion over 902,087 answers)."""
PREFILL_S = 2.0


@dataclass(frozen=True)
class Curve:
    """Output tokens per second over requests running; `capacity` is where the server starts to queue."""

    name: str
    tok_s: Callable[[float], float]
    capacity: int = 10_000
    kv_requests: int | None = None
    noise: float = 0.0

    def running(self, concurrency: int) -> int:
        """Requests that run at once."""
        return min(concurrency, self.capacity, self.kv_requests or concurrency)

    def truth(self, concurrency: int) -> float:
        """Noise-free throughput; beyond the KV pool each further request costs retracted work."""
        value = self.tok_s(self.running(concurrency))
        if self.kv_requests and concurrency > self.kv_requests:
            value *= max(0.6, 1 - 0.3 * (concurrency / self.kv_requests - 1))
        return value


@dataclass
class CurveDriver:
    """Every server of a simulated fleet; `clock` is each server's own simulated seconds."""

    curves: Mapping[str, Curve]
    seed: int = 0
    mean_tokens: float = MEAN_TOKENS
    clock: dict[str, float] = field(default_factory=dict)
    work_windows: int | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._limits = dict.fromkeys(self.curves, 0)
        self._in_flight = dict.fromkeys(self.curves, 0)
        self.clock = dict.fromkeys(self.curves, 0.0)

    def servers(self) -> list[str]:
        return list(self.curves)

    def limit(self, server: str) -> int:
        return self._limits[server]

    def set_limit(self, server: str, limit: int) -> None:
        self._limits[server] = limit

    async def window(self, server: str, min_s: float, max_s: float) -> LoadWindow:
        return self.measure(server, self._limits[server], min_s)

    def measure(self, server: str, concurrency: int, seconds: float) -> LoadWindow:
        """Settle, then one window; both on the simulated clock."""
        curve = self.curves[server]
        self.clock[server] += self._settle(server, concurrency) + seconds
        running = curve.running(concurrency)
        sd = curve.noise * math.sqrt(20 / seconds)
        tokens = curve.truth(concurrency) * seconds * max(0.1, 1 + self._random.gauss(0, sd))
        kv = min(1.0, running / curve.kv_requests) if curve.kv_requests else 0.3
        over = curve.kv_requests is not None and concurrency > curve.kv_requests
        return LoadWindow(
            server, concurrency, seconds, tokens, running, max(0, concurrency - running), kv, 5.0 if over else 0.0,
            accept_length=3.0, power_w=500 + running / 2, ttft_s=0.2, itl_s=running / curve.truth(concurrency),
        )  # fmt: skip

    def _settle(self, server: str, concurrency: int) -> float:
        before, self._in_flight[server] = self._in_flight[server], concurrency
        if concurrency == before:
            return 0.0
        if concurrency > before:
            return PREFILL_S
        answer_s = self.mean_tokens * before / self.curves[server].truth(before)
        return answer_s * (1 - concurrency / before)


def saturating(peak: float = 4400, half: float = 24) -> Callable[[float], float]:
    """Rises and levels off."""
    return lambda c: peak * c / (c + half)


def humped(peak: float = 3000, at: float = 48, width: float = 2.2) -> Callable[[float], float]:
    """Falls again beyond a best concurrency."""
    return lambda c: peak * math.exp(-(math.log2(c / at) ** 2) / (2 * width**2))


def dipped(peak: float = 5000, half: float = 60, at: float = 64, depth: float = 0.25) -> Callable[[float], float]:
    """Saturating, with a dip where no graph was captured, and a rise behind it."""
    return lambda c: peak * c / (c + half) * (1 - depth * math.exp(-((math.log2(c / at) / 0.35) ** 2)))


def stepped(peak: float = 4000, half: float = 30, graph: int = 100) -> Callable[[float], float]:
    """Loses a fifth beyond the largest captured batch."""
    return lambda c: peak * c / (c + half) * (0.8 if c > graph else 1.0)


def tabled(points: Mapping[int, float]) -> Callable[[float], float]:
    """Log-linear through measured points, flat outside."""
    xs = sorted(points)

    def value(c: float) -> float:
        if c <= xs[0]:
            return points[xs[0]] * c / xs[0]
        for low, high in itertools.pairwise(xs):
            if c <= high:
                share = math.log(c / low) / math.log(high / low)
                return points[low] + share * (points[high] - points[low])
        return points[xs[-1]]

    return value


def simulated_curves() -> list[Curve]:
    """The kinds that issue and design name: saturating, non-monotone, KV-limited, slot-limited; quiet and noisy."""
    kinds = [
        Curve("saturating", saturating()),
        Curve("late knee", saturating(9000, 150)),
        Curve("early knee", saturating(900, 3)),
        Curve("flat from 1", lambda c: 50.0 * min(c, 2) ** 0.1),
        Curve("humped", humped()),
        Curve("humped, early", humped(at=11)),
        Curve("humped between doublings", humped(at=90, width=1.0)),
        Curve("dip at 64", dipped()),
        Curve("graphs end at 100", stepped()),
        Curve("KV for 100", saturating(8000, 150), kv_requests=100),
        Curve("KV for 37", saturating(8000, 150), kv_requests=37),
        Curve("slots 22", saturating(3000, 12), capacity=22),
        Curve("slots 2", lambda c: 30.0 * c**0.8, capacity=2),
    ]
    noisy = [
        Curve(f"{c.name}, {label}", c.tok_s, c.capacity, c.kv_requests, sd)
        for c in kinds
        for label, sd in (("noise 2%", 0.02), ("stress 5%", 0.05))
    ]
    return kinds + noisy


def measured_curves(captures: Path) -> list[Curve]:
    """Sweeps recorded on a real GPU, as curves (the noise is added by the benchmark)."""
    found = []
    for path in sorted(captures.glob("*/bench/*-levels.json")):
        levels = json.loads(path.read_text())
        points = {level["concurrency"]: level["output_tok_s"] for level in levels["levels"]}
        command = levels["command"]
        slots = int(command[command.index("--max-running-requests") + 1])
        if len(points) >= 3:
            name = f"H200 {path.stem.removesuffix('-levels')}"
            found.append(Curve(name, tabled({c: t for c, t in points.items() if c <= slots}), slots, noise=0.01))
    return found
