"""The main figures of a run: what the tiles, the Markdown artifact and `regen status` show."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from tasks.report.read import RunData

J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums and rates; None where nothing tells. Seconds, tokens per second, joules, kWh, the budget's currency."""

    dataset: str
    run_id: str
    model: str
    total: int | None
    done: int
    failed: int
    output_tokens: int
    seconds: float | None
    tok_s: float | None
    accept_length: float | None
    energy_j: float | None
    mean_power_w: float | None
    cost: float | None
    failed_reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def kwh(self) -> float | None:
        """Energy in kWh."""
        return None if self.energy_j is None else self.energy_j / J_PER_KWH

    @property
    def j_per_token(self) -> float | None:
        """Joules for an output token, idle and start-up of the sampled time included."""
        return self.energy_j / self.output_tokens if self.energy_j is not None and self.output_tokens else None

    @property
    def pending(self) -> int | None:
        """Prompts that are neither done nor failed."""
        return None if self.total is None else max(0, self.total - self.done - self.failed)


def figures(data: RunData) -> Figures:
    """Figures from chunk records, with the newest progress line where that knows more (a chunk still open)."""
    last = data.progress.tail(1).to_dicts()[0] if data.progress.height else {}
    done = max(_sum(data, "done"), int(last.get("done") or 0))
    failed = max(_sum(data, "failed"), int(last.get("failed") or 0))
    tokens = max(_sum(data, "output_tokens"), int(last.get("output_tokens") or 0))
    seconds = data.fact("generation").get("seconds") or _seconds(data.progress)
    energy = energy_j(data.power)
    span = _seconds(data.power)
    totals = (last.get("total"), data.fact("prompts").get("pending"), data.fact("validation").get("kept"))
    total = next((int(value) for value in totals if value is not None), None)
    rate = data.fact("generation").get("tok_s") or (tokens / seconds if seconds else last.get("tok_s"))
    return Figures(
        dataset=str(data.group("publish").get("dataset") or data.paths.dataset_dir.name),
        run_id=data.paths.run_id,
        model=str(data.group("target").get("model") or "unknown model"),
        total=total,
        done=done,
        failed=failed,
        output_tokens=tokens,
        seconds=seconds,
        tok_s=rate,
        accept_length=accept_length(data),
        energy_j=energy,
        mean_power_w=energy / span if energy is not None and span else None,
        cost=cost(data, energy, seconds),
        failed_reasons=dict(sum((Counter(dict(c.get("failed_reasons") or {})) for c in data.chunks), Counter())),
    )


def energy_j(power: pl.DataFrame) -> float | None:
    """Joules of all GPUs: the driver's own counter where it grows, else the trapezoid of the sampled watts."""
    total, known = 0.0, False
    for _, gpu in power.group_by("gpu_uuid"):
        counter = gpu.sort("time_s")["energy_j"].drop_nulls()
        steps = counter.diff().drop_nulls()
        used = float(steps.filter(steps > 0).sum()) if steps.len() else 0.0
        if not used:
            watts = gpu.drop_nulls("watts").sort("time_s")
            if watts.height < 2:
                continue
            middle = (watts["watts"] + watts["watts"].shift(1)) / 2
            used = float((middle * watts["time_s"].diff()).sum())
        total, known = total + used, True
    return total if known else None


def accept_length(data: RunData) -> float | None:
    """Mean over the run where it was sampled, else what the MTP gate found."""
    known = data.progress["accept_length"].drop_nulls()
    if known.len():
        return float(known.mean())  # type: ignore[arg-type]
    gate = data.fact("gates").get("mtp") or {}
    found = data.fact("generation").get("accept_length") or (gate.get("details") or {}).get("accept_length")
    return float(found) if isinstance(found, (int, float)) else None


def cost(data: RunData, energy: float | None, seconds: float | None) -> float | None:
    """GPU hours and energy at the budget's prices; None without prices."""
    budget = data.group("budget")
    per_hour, per_kwh = budget.get("price_per_gpu_hour"), budget.get("price_per_kwh")
    gpus = len({u for server in data.record.get("servers") or [] for u in server.get("gpu_uuids") or []})
    gpus = gpus or data.power["gpu_uuid"].n_unique()
    parts = []
    if per_hour and seconds and gpus:
        parts.append(per_hour * gpus * seconds / 3600)
    if per_kwh and energy is not None:
        parts.append(per_kwh * energy / J_PER_KWH)
    return sum(parts) if parts else None


def markdown(found: Figures) -> str:
    """The main figures as a Markdown table, for a Prefect artifact."""
    lines = [f"## {found.dataset} · run `{found.run_id}`", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in tiles(found)]
    if found.failed_reasons:
        lines += ["", "| not answered because of | prompts |", "|---|---|"]
        lines += [
            f"| {code} | {count:,} |" for code, count in sorted(found.failed_reasons.items(), key=lambda i: -i[1])
        ]
    return "\n".join(lines)


def tiles(found: Figures) -> list[tuple[str, str]]:
    """(name, value) of everything that is known, most important first."""
    total = "" if found.total is None else f" of {found.total:,}"
    shown: list[tuple[str, str | None]] = [
        ("answered", f"{found.done:,}{total}"),
        ("not answered", f"{found.failed:,}"),
        ("output tokens", f"{found.output_tokens:,}"),
        ("tokens a second", _format(found.tok_s, ",.0f")),
        ("duration", duration(found.seconds)),
        ("acceptance length", _format(found.accept_length, ".2f")),
        ("joules a token", _format(found.j_per_token, ".3g")),
        ("energy", _format(found.kwh, ",.3g", " kWh")),
        ("mean power", _format(found.mean_power_w, ",.0f", " W")),
        ("cost", _format(found.cost, ",.2f")),
        ("model", found.model),
    ]
    return [(name, value) for name, value in shown if value is not None]


def duration(seconds: float | None) -> str | None:
    """`45 s`, `12 min`, `2 h 05 min`, `3 d 4 h`."""
    if seconds is None:
        return None
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _format(value: Any, form: str, unit: str = "") -> str | None:
    return None if value is None else f"{value:{form}}{unit}"


def _sum(data: RunData, name: str) -> int:
    return sum(int(chunk.get(name) or 0) for chunk in data.chunks)


def _seconds(frame: pl.DataFrame) -> float | None:
    if frame.height < 2:
        return None
    times = frame["time_s"].to_numpy()
    return float(times.max() - times.min())
