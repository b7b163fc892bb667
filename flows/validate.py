"""The deployment `validate/…`: may I train on this, or regenerate from it? The command `regen validate`, in Prefect."""

import asyncio
from pathlib import Path
from typing import Any

from prefect import flow

from flows import plain_logs
from flows.local_target import local_target
from tasks.errors import GateError
from tasks.settings import TargetSettings
from tasks.validation.settings import SourceSettings
from tasks.validation.task import validate_sources

plain_logs.install()


@flow(name="validate", persist_result=False)
async def validate(
    source: SourceSettings,
    target: TargetSettings | None = None,
    for_training: bool = True,
    out_dir: str = "out/validate",
) -> dict[str, Any]:
    """Judge every row of the sources; show sums, reasons, examples, the histogram of supervised tokens and a verdict.

    `for_training` asks whether the rows may be trained on; off, whether their prompts may be regenerated. `out_dir`
    (local) gets prompts.parquet and rejected.parquet. Raises GateError when the gate is enforced and says no.
    """
    text = None
    if target is not None:
        from tasks.target.load import load_target

        text = await asyncio.to_thread(load_target, await asyncio.to_thread(local_target, target))
    result = await validate_sources(source, text, Path(out_dir), for_training=for_training)
    if result.report.stops:
        raise GateError(f"{result.report.verdict}: {result.report.summary}", result.report.as_dict())
    return {
        "rows": result.rows,
        "kept": result.kept,
        "rejected": result.rejected,
        "duplicates": result.duplicates,
        "reasons": dict(result.reasons),
        "verdict": result.report.verdict,
        "rejected_path": result.rejected_path,
        "prompts_path": result.prompts_path,
    }
