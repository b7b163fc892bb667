"""Windows of readings turned into numbers: means of distinct samples, throttled shares, and whether to believe them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tasks.power.readings import UPDATE_PERIOD_S, EventReason
from tasks.records import PowerSample


@dataclass(frozen=True, slots=True)
class WindowRules:
    """When a window is good enough. Seconds, counts and degrees Celsius."""

    min_s: float = 30.0
    """Least length of a window that a baseline is made of."""
    min_samples: int = 200
    """Least distinct readings: 40 s at 5 a second."""
    floor_s: float = 5.0
    """Below this NVML's 100 ms updates and 1 s averages make the mean worthless (measured by ML.ENERGY)."""
    max_drift_c_per_10s: float = 1.0
    """A card that still warms up draws more each minute: its mean is not its steady power."""
    counter_tolerance: float = 0.10
    """The energy counter is believed within this of the mean of the power readings (it is wrong on some boards)."""


RULES = WindowRules()


@dataclass(frozen=True, slots=True)
class PowerStats:
    """One GPU over one window. Shares are fractions of the window; None where the driver does not tell."""

    gpu_uuid: str
    start_s: float
    window_s: float
    samples: int
    distinct: int
    coverage: float
    source: str
    mean_w: float
    p10_w: float
    p90_w: float
    max_w: float
    energy_j: float | None = None
    counter_w: float | None = None
    counter_trusted: bool = False
    temperature_c: float | None = None
    drift_c_per_10s: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    utilization: float | None = None
    enforced_limit_w: float | None = None
    default_limit_w: float | None = None
    sw_power_share: float | None = None
    sw_thermal_share: float | None = None
    hw_thermal_share: float | None = None
    hw_brake_share: float | None = None
    reason_shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def fraction_of_enforced_limit(self) -> float | None:
        """Mean power ÷ enforced limit as read from the driver (never a TDP looked up by name)."""
        return self.mean_w / self.enforced_limit_w if self.enforced_limit_w else None

    def dynamic_fraction(self, idle_w: float | None) -> float | None:
        """(mean - idle) ÷ (enforced limit - idle)."""
        if idle_w is None or not self.enforced_limit_w or self.enforced_limit_w <= idle_w:
            return None
        return (self.mean_w - idle_w) / (self.enforced_limit_w - idle_w)

    @property
    def hw_slowdown_share(self) -> float | None:
        """Share of the window under hardware thermal or power-brake slowdown: counters, else the sampled bits."""
        counted = [share for share in (self.hw_thermal_share, self.hw_brake_share) if share is not None]
        sampled = [self.reason_shares.get(name, 0.0) for name in ("HW_SLOWDOWN", "HW_THERMAL", "HW_POWER_BRAKE")]
        return sum(counted) if counted else (max(sampled) if self.reason_shares else None)


def distinct(samples: Sequence[PowerSample], period_s: float = UPDATE_PERIOD_S) -> tuple[list[float], str]:
    """Watts of the readings that are really new, and which field they are from.

    A reading repeats the last one when its value is equal and less than an update period has passed. The averaged
    field covers all of the time (on Hopper; the instant one a quarter of it), so it is taken where it is given.
    """
    source = "average" if any(s.power_average_w is not None for s in samples) else "instant"
    values: list[float] = []
    last: tuple[float, float] | None = None
    for sample in samples:
        power_w = sample.power_average_w if source == "average" else sample.power_instant_w
        if power_w is None or power_w <= 0:
            continue
        if last is not None and power_w == last[1] and sample.time_s - last[0] < period_s * 0.95:
            continue
        last = (sample.time_s, power_w)
        values.append(power_w)
    return values, source


def summarize(samples: Sequence[PowerSample], rules: WindowRules = RULES) -> PowerStats | None:
    """Statistics of one GPU's readings in time order; None when there is no power reading among them.

    Raises ValueError when the readings are of several GPUs.
    """
    uuids = {sample.gpu_uuid for sample in samples}
    if len(uuids) > 1:
        raise ValueError(f"readings of {len(uuids)} GPUs in one window; split them with by_gpu()")
    watts, source = distinct(samples)
    if not watts:
        return None
    window_s = samples[-1].time_s - samples[0].time_s
    mean_w = float(np.mean(watts))
    energy_j, counter_w = _energy(samples)
    p10_w, p90_w = (float(value) for value in np.percentile(watts, [10, 90]))
    reasons = [sample.event_reasons for sample in samples if sample.event_reasons is not None]
    return PowerStats(
        gpu_uuid=samples[0].gpu_uuid,
        start_s=samples[0].time_s,
        window_s=window_s,
        samples=len(samples),
        distinct=len(watts),
        coverage=min(1.0, len(watts) * UPDATE_PERIOD_S / window_s) if window_s > 0 else 0.0,
        source=source,
        mean_w=mean_w,
        p10_w=p10_w,
        p90_w=p90_w,
        max_w=max(watts),
        energy_j=energy_j,
        counter_w=counter_w,
        counter_trusted=counter_w is not None and abs(counter_w - mean_w) <= rules.counter_tolerance * mean_w,
        temperature_c=_mean(samples, "temperature_c"),
        drift_c_per_10s=_drift(samples),
        sm_clock_mhz=_mean(samples, "sm_clock_mhz"),
        memory_clock_mhz=_mean(samples, "memory_clock_mhz"),
        utilization=_mean(samples, "utilization"),
        enforced_limit_w=_last(samples, "enforced_limit_w"),
        default_limit_w=_last(samples, "default_limit_w"),
        sw_power_share=_throttled(samples, "throttle_sw_power_ns"),
        sw_thermal_share=_throttled(samples, "throttle_sw_thermal_ns"),
        hw_thermal_share=_throttled(samples, "throttle_hw_thermal_ns"),
        hw_brake_share=_throttled(samples, "throttle_hw_brake_ns"),
        reason_shares=_reason_shares(reasons),
    )


def by_gpu(samples: Sequence[PowerSample]) -> dict[str, list[PowerSample]]:
    """Readings split by GPU, each in time order."""
    split: dict[str, list[PowerSample]] = {}
    for sample in sorted(samples, key=lambda s: s.time_s):
        split.setdefault(sample.gpu_uuid, []).append(sample)
    return split


def window_problems(stats: PowerStats, rules: WindowRules = RULES) -> list[str]:
    """Why this window may not become, or be held against, a baseline. Empty when it may."""
    problems = []
    if stats.window_s < rules.floor_s:
        problems.append(f"{stats.window_s:.1f} s is below the {rules.floor_s:.0f} s that a mean needs at all")
    elif stats.window_s < rules.min_s:
        problems.append(f"{stats.window_s:.1f} s of window, {rules.min_s:.0f} s wanted")
    if stats.distinct < rules.min_samples:
        problems.append(f"{stats.distinct} distinct readings, {rules.min_samples} wanted")
    if stats.drift_c_per_10s is not None and stats.drift_c_per_10s > rules.max_drift_c_per_10s:
        problems.append(f"still warming by {stats.drift_c_per_10s:.1f} °C in 10 s")
    return problems


def _energy(samples: Sequence[PowerSample]) -> tuple[float | None, float | None]:
    """(joules, watts) by the energy counter; None where it is missing, fell back (driver reload) or did not move."""
    counted = [(s.time_s, s.energy_j) for s in samples if s.energy_j is not None]
    if len(counted) < 2:
        return None, None
    (start_s, start_j), (end_s, end_j) = counted[0], counted[-1]
    joules, seconds = end_j - start_j, end_s - start_s
    if joules <= 0 or seconds <= 0:
        return None, None
    return joules, joules / seconds


def _throttled(samples: Sequence[PowerSample], name: str) -> float | None:
    """Growth of a nanosecond counter ÷ the time it took; None without the counter or when it fell back."""
    counted = [(s.time_s, value) for s in samples if (value := getattr(s, name)) is not None]
    if len(counted) < 2:
        return None
    seconds, grown_ns = counted[-1][0] - counted[0][0], counted[-1][1] - counted[0][1]
    if seconds <= 0 or grown_ns < 0:
        return None
    return float(min(1.0, grown_ns * 1e-9 / seconds))


def _reason_shares(reasons: Sequence[int]) -> dict[str, float]:
    if not reasons:
        return {}
    shares = {r.name or "": sum(bool(bits & r) for bits in reasons) / len(reasons) for r in EventReason}
    return {name: share for name, share in shares.items() if share > 0} or {"NONE": 1.0}


def _drift(samples: Sequence[PowerSample]) -> float | None:
    """Slope of a line through the temperatures, degrees Celsius in 10 s; None below 5 s of readings."""
    warm = [(s.time_s, s.temperature_c) for s in samples if s.temperature_c is not None]
    if len(warm) < 3 or warm[-1][0] - warm[0][0] < RULES.floor_s:
        return None
    times, degrees = np.array(warm, dtype=float).T
    return float(np.polyfit(times - times[0], degrees, 1)[0] * 10)


def _mean(samples: Sequence[PowerSample], name: str) -> float | None:
    values = [value for s in samples if (value := getattr(s, name)) is not None]
    return float(np.mean(values)) if values else None


def _last(samples: Sequence[PowerSample], name: str) -> float | None:
    values = [value for s in samples if (value := getattr(s, name)) is not None]
    return float(values[-1]) if values else None
