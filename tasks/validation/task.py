"""Validation as a Prefect task: one call, and what a person sees of it."""

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.records import ValidationResult
from tasks.target.text import TargetText
from tasks.ui import task as ui
from tasks.validation.examples import examples
from tasks.validation.plots import histogram_png
from tasks.validation.reasons import EXPLANATIONS
from tasks.validation.run import validate
from tasks.validation.settings import SourceSettings


# A retry would find the same rows; only what is shown is worth remembering, so nothing is persisted.
@task(
    name="validation", timeout_seconds=timedelta(hours=12).total_seconds(), persist_result=False, cache_policy=NO_CACHE
)
async def validate_sources(
    settings: SourceSettings,
    target: TargetText | None,
    out_dir: Path,
    samples: int = 1,
    for_training: bool = False,
    skip_ids: Path | None = None,
) -> ValidationResult:
    """Judge the sources, show sums, reasons, examples, histogram and verdict. The flow decides what the gate stops."""
    state = [0, 1]

    def progress(judged: int, total: int) -> None:
        state[:] = [judged, max(total, 1)]

    def read() -> tuple[float, str]:
        return 100 * state[0] / state[1], f"{state[0] / 1e6:,.0f} of {state[1] / 1e6:,.0f} MB judged"

    with ui.LiveProgress("validation-progress", read):
        result = await asyncio.to_thread(
            validate,
            settings,
            target,
            out_dir,
            samples=samples,
            for_training=for_training,
            skip_ids=skip_ids,
            progress=progress,
        )
    show(result, settings)
    return result


def show(result: ValidationResult, settings: SourceSettings) -> None:
    """Artifacts: the verdict, the table of reasons, examples of each, and the histogram of supervised tokens."""
    sums = [
        {"outcome": "kept", "reason": "", "rows": result.kept, "what it means": "usable"},
        *_rows("rejected", result.reasons),
        *_rows("duplicate", result.report.details["duplicate_reasons"]),
        *_rows("kept, old response bad", result.regenerate_reasons),
    ]
    ui.table("validation-reasons", sums, f"{result.rows:,} rows: {result.report.summary}")
    shown = examples(Path(result.rejected_path))
    if shown:
        ui.table("validation-examples", shown, "Examples of each reason; rejected.parquet has every row")
    tokens = result.report.details.get("tokens")
    about = (settings.min_content_tokens, result.report.summary)
    if tokens and (png := ui.drawn(histogram_png, tokens["histogram"], *about)):
        ui.picture("validation-histogram", png, "Supervised tokens a sample")
    ui.gate(result.report)


def _rows(outcome: str, reasons: Mapping[str, int]) -> list[dict[str, object]]:
    return [
        {"outcome": outcome, "reason": code, "rows": count, "what it means": EXPLANATIONS[code]}
        for code, count in sorted(reasons.items(), key=lambda item: -item[1])
    ]
