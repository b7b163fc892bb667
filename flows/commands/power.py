"""`regen power`: what the GPUs draw, and what limits them."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import click


@click.command(help="Show what the GPUs draw, and what limits them.\n\nExample: regen power --once")
@click.option("--once", is_flag=True, help="One reading, then exit (also when stdout is no terminal).")
@click.option("--json", "as_json", is_flag=True, help="One JSON line a reading instead of a table.")
@click.option(
    "--every", "every_s", default=1.0, show_default=True, type=click.FloatRange(0.2), help="Seconds between readings."
)
@click.option("--seconds", default=None, type=click.FloatRange(0), help="Stop after so many seconds.")
def command(once: bool, as_json: bool, every_s: float, seconds: float | None) -> dict[str, Any]:
    """Live table until Ctrl-C; UNKNOWN and exit 0 where there is no NVIDIA GPU."""
    from tasks.power.nvml import open_nvml

    nvml = open_nvml()
    if nvml is None:
        click.echo("no NVIDIA driver or GPU on this machine: power is UNKNOWN", err=True)
        return {"verdict": "UNKNOWN", "reason": "no NVIDIA driver or GPU on this machine", "gpus": []}
    try:
        reading = snapshot(nvml)
        if once or (not as_json and not sys.stdout.isatty()):
            # Counters of activity need an interval: the second reading has them.
            time.sleep(0.2)
            reading = snapshot(nvml)
            if not as_json:
                show(reading)
            return summary(reading)
        return summary(_follow(nvml, reading, as_json, every_s, seconds))
    finally:
        nvml.close()


def snapshot(sensor: Any) -> list[dict[str, Any]]:
    """One reading of every GPU, as plain values."""
    from tasks.power.readings import reason_names

    rows = []
    for info in sensor.gpus():
        sample, activity = sensor.read(info.uuid), sensor.activity(info.uuid)
        power_w = sample.power_average_w if sample.power_average_w is not None else sample.power_instant_w
        limit_w = sample.enforced_limit_w
        rows.append(
            {
                "index": info.index,
                "uuid": info.uuid,
                "name": info.name,
                "power_w": power_w,
                "power_instant_w": sample.power_instant_w,
                "enforced_limit_w": limit_w,
                "default_limit_w": sample.default_limit_w,
                "fraction_of_enforced_limit": power_w / limit_w if power_w is not None and limit_w else None,
                "sm_clock_mhz": sample.sm_clock_mhz,
                "memory_clock_mhz": sample.memory_clock_mhz,
                "temperature_c": sample.temperature_c,
                "memory_temperature_c": sample.memory_temperature_c,
                "utilization": sample.utilization,
                "memory_used_bytes": sample.memory_used_bytes,
                "memory_bytes": info.memory_bytes,
                "sm": activity.sm if activity else None,
                "tensor": activity.tensor if activity else None,
                "dram": activity.dram if activity else None,
                "limited_by": reason_names(sample.event_reasons),
                "energy_j": sample.energy_j,
                "unsupported": info.unsupported,
                "limit_lowered": _lowered(limit_w, sample.default_limit_w),
            }
        )
    return rows


def _lowered(limit_w: float | None, default_w: float | None) -> bool:
    return limit_w is not None and default_w is not None and limit_w < default_w - 1.0


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last line: what was read, and the one thing that can be said without a running job."""
    watts = [row["power_w"] for row in rows if row["power_w"] is not None]
    judged = any(row["unsupported"] is None for row in rows)
    lowered = any(row["limit_lowered"] for row in rows)
    verdict = "UNKNOWN" if not judged else ("LIMIT_CHANGED" if lowered else "READ")
    return {"verdict": verdict, "power_w": round(sum(watts), 1) if watts else None, "gpus": list(rows)}


def _follow(
    sensor: Any, reading: list[dict[str, Any]], as_json: bool, every_s: float, seconds: float | None
) -> list[dict[str, Any]]:
    """Until Ctrl-C or `seconds`: that is how a person leaves it, not an error."""
    from rich.live import Live

    until_s = None if seconds is None else time.monotonic() + seconds
    try:
        if as_json:
            while until_s is None or time.monotonic() < until_s:
                click.echo(json.dumps({"time_s": time.time(), "gpus": reading}))
                time.sleep(every_s)
                reading = snapshot(sensor)
            return reading
        with Live(table(reading), refresh_per_second=4) as live:
            while until_s is None or time.monotonic() < until_s:
                time.sleep(every_s)
                reading = snapshot(sensor)
                live.update(table(reading))
    except KeyboardInterrupt:
        pass
    return reading


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table once."""
    from rich.console import Console

    Console().print(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """What a person wants to see: watts against the limit that is really in force, and what holds the card back."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title="GPU power", caption="limit = enforced now; * = below the board's default")
    for name in ("GPU", "power", "limit", "", "SM", "temp", "util", "SM/tensor/DRAM", "memory", "limited by"):
        shown.add_column(name, justify="left" if name in ("GPU", "limited by", "") else "right")
    for row in rows:
        fraction = row["fraction_of_enforced_limit"]
        reasons = [name for name in row["limited_by"] if name != "GPU_IDLE"]
        shown.add_row(
            f"{row['index']} {row['name']}",
            _unit(row["power_w"], "W"),
            _unit(row["enforced_limit_w"], "W") + ("*" if row["limit_lowered"] else ""),
            Text(_bar(fraction), style="red" if (fraction or 0) > 0.95 else "green"),
            _unit(row["sm_clock_mhz"], "MHz"),
            _unit(row["temperature_c"], "°C"),
            _share(row["utilization"]),
            " ".join(_share(row[name]) for name in ("sm", "tensor", "dram")),
            _unit(row["memory_used_bytes"], "GiB", 2**-30),
            row["unsupported"] or ", ".join(reasons) or ("idle" if row["limited_by"] else "–"),
        )
    return shown


def _bar(fraction: float | None, width: int = 20) -> str:
    if fraction is None:
        return ""
    filled = round(min(1.0, fraction) * width)
    return "█" * filled + "░" * (width - filled) + f" {fraction:.0%}"


def _unit(value: float | None, unit: str, factor: float = 1.0) -> str:
    return "?" if value is None else f"{value * factor:.0f} {unit}"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"
