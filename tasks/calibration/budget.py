"""Is the forecast inside the deadline and the cost? The median decides, the interval is told."""

from typing import Any

from tasks.calibration.settings import BudgetSettings
from tasks.records import Expectation, Forecast, GateReport, Level

NEXT_STEPS = (
    "Look at the calibration plot: is MTP on, are all GPUs used, is a server a straggler?",
    "Lower sampling.max_tokens or the number of prompts, add GPUs, or raise budget.deadline_h / budget.max_cost.",
    "Set budget.over_budget to `approve` to let a person decide in the UI.",
)


def check(forecast: Forecast | None, budget: BudgetSettings, gpus: int, elapsed_s: float = 0.0) -> GateReport:
    """Hold the forecast against the budget. `elapsed_s`: seconds of generation that are gone already."""
    if forecast is None:
        return _report("NO_FORECAST", Level.WARNING, "nothing has finished yet, so nothing can be forecast", [], {})
    hours = tuple((seconds + elapsed_s) / 3600 for seconds in forecast.time_s)
    cost = _whole_cost(forecast, elapsed_s)
    limits = (
        ("deadline", hours, budget.deadline_h, "h"),
        ("cost", cost, budget.max_cost, ""),
    )
    checks = [_expect(name, value, limit, unit) for name, value, limit, unit in limits if limit is not None]
    details = {"hours": hours, "cost": cost, "tokens": forecast.tokens, "energy_kwh": forecast.energy_kwh, "gpus": gpus}
    failed = [check for check in checks if not check.passed and check.level is Level.CRITICAL]
    unsure = [check for check in checks if not check.passed and check.level is Level.WARNING]
    told = f"{describe(hours, 'h')} for {forecast.remaining_prompts:,} prompts" + (
        f", cost {describe(cost)}" if cost else ""
    )
    if failed:
        verdict = "OVER_DEADLINE" if failed[0].name == "deadline" else "OVER_COST"
        return _report(verdict, Level.CRITICAL, f"{told}: {failed[0].message}", checks, details)
    if unsure:
        return _report("MAY_GO_OVER", Level.WARNING, f"{told}: {unsure[0].message}", checks, details)
    return _report("WITHIN_BUDGET" if checks else "NO_BUDGET", Level.OK, told, checks, details)


def _whole_cost(forecast: Forecast, elapsed_s: float) -> tuple[float, float, float] | None:
    """Cost from the start: what is gone cost as much a second as what remains."""
    if forecast.cost is None:
        return None
    pairs = zip(forecast.cost, forecast.time_s, strict=True)
    median, low, high = (cost * (1 + elapsed_s / seconds) if seconds else cost for cost, seconds in pairs)
    return median, low, high


def _expect(name: str, value: tuple[float, ...] | None, limit: float, unit: str) -> Expectation:
    if value is None:
        message = f"max_cost is {limit:g} but no price is known: set budget.price_per_gpu_hour or price_per_kwh"
        return Expectation(name, False, message, Level.WARNING)
    median, _, high = value
    if median > limit:
        return Expectation(name, False, f"{describe(value, unit)} is over the {name} of {limit:g} {unit}".rstrip())
    if high > limit:
        message = f"{describe(value, unit)} may go over the {name} of {limit:g} {unit}".rstrip()
        return Expectation(name, False, message, Level.WARNING)
    return Expectation(name, True, f"{describe(value, unit)} is within the {name} of {limit:g} {unit}".rstrip())


def describe(value: tuple[float, ...] | None, unit: str = "") -> str:
    """`10.2 h (9.1 to 11.9)`: median and 90 % interval."""
    if value is None:
        return "unknown"
    median, low, high = (f"{number:,.3g}" if number < 100 else f"{number:,.0f}" for number in value)
    return f"{median} {unit}".rstrip() + f" ({low} to {high})"


def rows_of(forecast: Forecast) -> list[dict[str, str]]:
    """The forecast as a table."""
    hours = tuple(seconds / 3600 for seconds in forecast.time_s)
    pairs = [
        ("time that remains", describe(hours, "h")),
        ("output tokens to come", describe(forecast.tokens)),
        ("energy, kWh", describe(forecast.energy_kwh)),
        ("cost", describe(forecast.cost)),
    ]
    return [{"what": name, "median (90 % interval)": value} for name, value in pairs if value != "unknown"]


def _report(verdict: str, level: Level, summary: str, checks: list[Expectation], details: dict[str, Any]) -> GateReport:
    steps = NEXT_STEPS if level is Level.CRITICAL else ()
    return GateReport("budget", verdict, level, "enforce", summary, tuple(checks), steps, details)
