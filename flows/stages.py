"""The stages' verbs: each calls one room's task, remembers what it found, and lets its gate decide."""

import asyncio
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flows.session import Session
from tasks.errors import DatasetError, GateError
from tasks.records import GateReport, ValidationResult
from tasks.upload.published import published_table
from tasks.upload.subtract import subtract
from tasks.validation.task import validate_sources


@dataclass(frozen=True, slots=True)
class Prompts:
    """What validation accepted, and how much of it has no published answer yet."""

    path: Path
    rows: int
    kept: int
    rejected: int
    duplicates: int
    pending: int
    already: int


def judge(run: Session, report: GateReport) -> GateReport:
    """Remember a gate's report; stop the run where the gate says so. Raises GateError with the evidence."""
    gates = {**run.facts.get("gates", {}), report.gate: report.as_dict()}
    run.note(gates=gates)
    if report.stops:
        steps = " ".join(report.next_steps[:3])
        raise GateError(f"the gate {report.gate} says {report.verdict}: {report.summary}. {steps}", report.as_dict())
    return report


async def validation(run: Session) -> Prompts:
    """Which prompts are usable and not answered yet? An adopted run keeps the prompts it began with."""
    known = run.facts.get("prompts")
    if run.adopted and known and run.paths.prompts.exists():
        return Prompts(path=run.paths.prompts, **known)
    result = await validate_sources(run.spec.source, run.target, run.paths.run_dir, samples=run.spec.sampling.samples)
    run.note(validation=_plain(result))
    judge(run, result.report)
    if not result.kept:
        raise DatasetError(
            f"none of {result.rows} rows is a usable prompt ({_counts(result)}); "
            f"{run.paths.rejected} has every row with its reason"
        )
    prompts = await asyncio.to_thread(_subtract, run, result)
    run.note(prompts={f.name: getattr(prompts, f.name) for f in fields(prompts) if f.name != "path"})
    return prompts


def _subtract(run: Session, result: ValidationResult) -> Prompts:
    """Leave only prompts without a published answer in prompts.parquet."""
    force = run.spec.generation
    published = published_table(run.store)
    if force.retry_failed:
        published = published.filter(published["outcome"] != "failed")
    sums = subtract(
        run.paths.prompts, run.paths.prompts, published, force.regenerate_ids, force.regenerate_reasons
    )
    run.note(subtraction=asdict(sums))
    return Prompts(
        run.paths.prompts, result.rows, result.kept, result.rejected, result.duplicates, sums.new, sums.already
    )


def _counts(result: ValidationResult) -> str:
    return ", ".join(f"{code} {count}" for code, count in result.reasons.items())


def _plain(result: ValidationResult) -> dict[str, Any]:
    found = asdict(result)
    found["report"] = result.report.as_dict()
    return found
