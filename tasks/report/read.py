"""Everything the report and `regen status` read, all of it optional: what is missing leaves its section out.

spec.json      spec.{publish.dataset, target.{model, revision}, sampling.*, budget.{price_per_kwh,
               price_per_gpu_hour}}, identity_digest, identity.template_sha256, versions.*, host
record.json    started, finished (Unix s); validation.{rows, kept, rejected, duplicates, reasons,
               regenerate_reasons}; prompts.{pending, already}; subtraction.{new, already, forced, vanished};
               servers[] (fields of tasks.records.Server); server_starts[], server_events[], fleet[] (any of: time_s,
               server or name, event or outcome, reason, attempt, seconds); gates.{name: GateReport.as_dict() and,
               if known, time_s}; gpus[].{name, uuid, driver}; generation.{seconds, tok_s, retries, accept_length};
               summary (its presence says that the run is over); error.{kind, message} of what ended it, or null;
               power_verdicts[].{time_s, verdict, level, summary}: changes during generation
calibration.json  limits, tok_s, stopped_because, windows[].(fields of LoadWindow; tok_s if given)
forecast.json  one forecast, or a list of them, or {forecasts: [...]}: fields of Forecast; made_s (Unix s) and
               total_s ([median, low, high]), if known
power.parquet  and power.parquet.parts/*.parquet: time_s, gpu_uuid, power_average_w, power_instant_w, energy_j
chunks/*/      chunk.json (fields of ChunkRecord), published.json, completions.parquet (output_tokens, messages,
               cut_reason, turns.finish_reason), tokens.parquet (n_supervised),
               tokens_rejected.parquet (reason)
progress.jsonl one JSON object a line, appended every few seconds: time_s, total, done, failed, in_flight,
               output_tokens, tok_s, power_w, accept_length, reject_rate, j_per_token, elapsed_s,
               eta_s ([median, low, high]), servers ({name: state})
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from tasks.cuts import count_cuts
from tasks.runs import RunPaths

MOST_POINTS = 400
"""Points of a line in a picture; more are averaged into buckets."""

SAMPLES = 4
SAMPLE_CHARACTERS = 1500


@dataclass(frozen=True, slots=True)
class RunData:
    """A run as its files tell it."""

    paths: RunPaths
    spec: Mapping[str, Any]
    record: Mapping[str, Any]
    calibration: Mapping[str, Any]
    forecasts: list[Mapping[str, Any]]
    chunks: list[Mapping[str, Any]]
    progress: pl.DataFrame
    power: pl.DataFrame
    last_line: Mapping[str, Any] = field(default_factory=dict)

    @property
    def servers(self) -> Mapping[str, str]:
        """Names and states of the servers, as the newest progress line has them."""
        return _mapping(self.last_line.get("servers"))

    def group(self, name: str) -> Mapping[str, Any]:
        """A group of the spec, or nothing."""
        return _mapping(_mapping(self.spec.get("spec")).get(name))

    def fact(self, name: str) -> Mapping[str, Any]:
        """An object of record.json, or nothing."""
        return _mapping(self.record.get(name))


def read_run(paths: RunPaths) -> RunData:
    """Read what there is; a damaged or half-written file counts as missing."""
    lines = list(_lines(paths.run_dir / "progress.jsonl"))
    return RunData(
        paths,
        load(paths.spec),
        load(paths.record),
        load(paths.calibration),
        read_forecasts(paths.forecast),
        [chunk for path in sorted(paths.chunks.glob("*/chunk.json")) if (chunk := load(path))],
        progress_frame(lines),
        read_power(paths.power),
        lines[-1] if lines else {},
    )


def load(path: Path) -> Mapping[str, Any]:
    """A JSON object, or {}."""
    return _mapping(_json(path))


def read_forecasts(path: Path) -> list[Mapping[str, Any]]:
    """Forecasts in the order in which they were made."""
    value = _json(path)
    if isinstance(value, Mapping):
        value = value.get("forecasts", [value])
    return (
        [item for item in value if isinstance(item, Mapping) and item.get("time_s")] if isinstance(value, list) else []
    )


NUMBERS = (
    *("time_s", "total", "done", "failed", "in_flight", "output_tokens", "tok_s", "power_w", "accept_length"),
    *("reject_rate", "j_per_token", "elapsed_s"),
)


def progress_frame(lines: list[Mapping[str, Any]]) -> pl.DataFrame:
    """progress.jsonl as numbers, in order of time; rows without a time are left out."""
    rows = [{name: _number(line.get(name)) for name in NUMBERS} for line in lines]
    frame = pl.DataFrame(rows, schema=dict.fromkeys(NUMBERS, pl.Float64))
    return frame.drop_nulls("time_s").sort("time_s")


def read_power(path: Path) -> pl.DataFrame:
    """One row a reading of one GPU: time_s, gpu_uuid, watts, energy_j; finished or not."""
    schema = {"time_s": pl.Float64, "gpu_uuid": pl.String, "watts": pl.Float64, "energy_j": pl.Float64}
    frames = []
    for file in [path, *sorted(path.with_name(path.name + ".parts").glob("*.parquet"))]:
        try:
            names = pl.read_parquet_schema(file)
        except (OSError, pl.exceptions.PolarsError):
            continue
        watts = [pl.col(n).cast(pl.Float64) for n in ("power_average_w", "power_instant_w") if n in names]
        energy = pl.col("energy_j").cast(pl.Float64) if "energy_j" in names else pl.lit(None, pl.Float64)
        columns = {"watts": pl.coalesce(watts) if watts else pl.lit(None, pl.Float64), "energy_j": energy}
        frames.append(pl.scan_parquet(file).select("time_s", "gpu_uuid", **columns).collect())
    if not frames:
        return pl.DataFrame(schema=schema)
    return pl.concat(frames).unique(["time_s", "gpu_uuid"]).sort("time_s", "gpu_uuid")


def thinned(frame: pl.DataFrame, columns: list[str]) -> pl.DataFrame:
    """At most MOST_POINTS bucket means over time_s, bucket starts kept as times."""
    if frame.height <= MOST_POINTS:
        return frame.select("time_s", *columns)
    low, high = frame["time_s"].min(), frame["time_s"].max()
    width = max((float(high) - float(low)) / MOST_POINTS, 1e-9)  # type: ignore[arg-type]
    bucket = ((pl.col("time_s") - low) / width).floor()
    means = [pl.col(name).mean() for name in ("time_s", *columns)]
    return frame.group_by(bucket.alias("bucket")).agg(means).sort("bucket").drop("bucket")


def column(paths: RunPaths, file: str, name: str) -> pl.Series:
    """One numeric column over all chunks; empty where nothing has it."""
    found = []
    for path in sorted(paths.chunks.glob(f"*/{file}")):
        try:
            if name in pl.read_parquet_schema(path):
                found.append(pl.read_parquet(path, columns=[name])[name].cast(pl.Float64))
        except (OSError, pl.exceptions.PolarsError):
            continue
    return pl.concat(found) if found else pl.Series(name, [], dtype=pl.Float64)


def cut_answers(paths: RunPaths) -> Mapping[str, int]:
    """Sums of `tasks.cuts.count_cuts` over all chunks."""
    sums: Counter[str] = Counter()
    for path in sorted(paths.chunks.glob("*/completions.parquet")):
        try:
            sums.update(count_cuts(path))
        except (OSError, pa.ArrowException, pl.exceptions.PolarsError):
            continue
    return sums


def rejected_reasons(paths: RunPaths) -> dict[str, int]:
    """Training rows refused after generation, by reason."""
    reasons: Counter[str] = Counter()
    for path in sorted(paths.chunks.glob("*/tokens_rejected.parquet")):
        try:
            reasons.update(str(code) for code in pl.read_parquet(path, columns=["reason"])["reason"])
        except (OSError, pl.exceptions.PolarsError):
            continue
    return dict(reasons)


def sample_answers(paths: RunPaths) -> list[dict[str, Any]]:
    """A few conversations, cut to a readable length. Prompts are in hash order, so the first are a random sample."""
    for path in sorted(paths.chunks.glob("*/completions.parquet")):
        try:
            names = pl.read_parquet_schema(path)
            if "messages" not in names:
                continue
            rows = pl.scan_parquet(path).select("prompt_id", "messages").head(SAMPLES).collect().to_dicts()
        except (OSError, pl.exceptions.PolarsError):
            continue
        if rows:
            return [{"id": row["prompt_id"], "messages": [_message(m) for m in row["messages"] or []]} for row in rows]
    return []


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    return {name: _cut(str(message.get(name) or "")) for name in ("role", "reasoning_content", "content", "tool_calls")}


def _cut(text: str) -> str:
    return text if len(text) <= SAMPLE_CHARACTERS else f"{text[:SAMPLE_CHARACTERS]} … ({len(text):,} characters)"


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.split("\n"):
        try:
            value = json.loads(line)
        except ValueError:
            continue  # the last line may be half written
        if isinstance(value, Mapping):
            yield value


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
