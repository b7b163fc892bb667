"""The stages' verbs: each calls one room's task, remembers what it found, and lets its gate decide."""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import polars as pl

from flows.session import Session
from tasks.errors import DatasetError, GateError
from tasks.generation.breaker import whole_run
from tasks.generation.engine import Engine
from tasks.generation.plan import finished, make_plan
from tasks.generation.task import generate_chunk
from tasks.records import ChunkRecord, GateReport, PublishedChunk, ValidationResult
from tasks.report.task import write_report
from tasks.runs import finish_run
from tasks.tokenization.task import tokenize
from tasks.ui import task as ui
from tasks.upload.published import published_table
from tasks.upload.subtract import subtract
from tasks.upload.task import publish, upload_chunk
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
    answered: int
    failed: int


@dataclass(frozen=True, slots=True)
class Made:
    """What this invocation generated."""

    answers: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


Done = tuple[ChunkRecord, PublishedChunk]
"""A chunk and its published files."""


def keep(run: Session, gate: str, report: Mapping[str, Any]) -> None:
    """Remember what a gate saw and when, for the manifest and the report's time plots."""
    run.note(gates={**run.facts.get("gates", {}), gate: {**report, "time_s": time.time()}})


def judge(run: Session, report: GateReport) -> GateReport:
    """Remember a gate's report; stop the run where the gate says so. Raises GateError with the evidence."""
    keep(run, report.gate, report.as_dict())
    if report.stops:
        said = f"the gate {report.gate} says {report.verdict}: {report.summary.rstrip('.')}."
        raise GateError(" ".join((said, *map(_sentence, report.next_steps[:3]))), report.as_dict())
    return report


def _sentence(text: str) -> str:
    """`text` with a capital and an end of its own, to stand beside others."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


async def judged(run: Session, gate: Awaitable[GateReport]) -> GateReport:
    """Await a gate that raises by itself; what it saw is remembered either way."""
    try:
        return judge(run, await gate)
    except GateError as error:
        if error.report:
            keep(run, error.report["gate"], error.report)
        raise


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
    accepted = pl.read_parquet(run.paths.prompts, columns=["prompt_id"])
    sums = subtract(run.paths.prompts, run.paths.prompts, published, force.regenerate_ids, force.regenerate_reasons)
    settled = accepted.join(published, on="prompt_id").filter(~pl.col("prompt_id").is_in(pending_ids(run).implode()))
    failed = settled.filter(pl.col("outcome") == "failed").height
    run.note(subtraction=asdict(sums))
    return Prompts(
        run.paths.prompts,
        result.rows,
        result.kept,
        result.rejected,
        result.duplicates,
        pending=sums.new,
        answered=settled.height - failed,
        failed=failed,
    )


def pending_ids(run: Session) -> pl.Series:
    """Ids that this run has to answer."""
    return pl.read_parquet(run.paths.prompts, columns=["prompt_id"])["prompt_id"]


def _counts(result: ValidationResult) -> str:
    return ", ".join(f"{code} {count}" for code, count in result.reasons.items())


def _plain(result: ValidationResult) -> dict[str, Any]:
    found = asdict(result)
    found["report"] = result.report.as_dict()
    return found


async def chunks(run: Session, engine: Engine) -> list[Done]:
    """Answer everything: each chunk is generated, tokenized and uploaded while the next ones generate.

    The engine opens chunks as its pool needs prompts; what follows generation has a few at a time, so that memory and
    disk stay bounded. Raises the first error as itself, not as a group: it is what the UI shows.
    """
    window = asyncio.Semaphore(run.spec.generation.open_chunks)

    async def one(index: int) -> Done:
        await engine.wait_open(index)
        record = await generate_chunk(engine, index)
        async with window:
            done = await finish_chunk(run, record)
        engine.release_chunk(index)
        return done

    try:
        async with asyncio.TaskGroup() as group:
            started = [group.create_task(one(index)) for index in engine.chunk_indices]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        if isinstance(first, GateError) and "gate" in first.report:
            keep(run, first.report["gate"], first.report)
        raise first from errors
    return [task.result() for task in started]


def all_generated(run: Session, prompts: Prompts) -> list[ChunkRecord] | None:
    """Every chunk's record when an earlier, interrupted invocation answered all of them; None while work is left."""
    plan = make_plan(run.paths, prompts.pending, run.spec.generation.chunk_rows)
    records = [record for _, record in finished(run.paths, plan)]
    open_failures = run.spec.generation.retry_failed and any(record.failed for record in records)
    return records if len(records) == plan.chunks and not open_failures else None


async def finish_chunk(run: Session, record: ChunkRecord) -> Done:
    """Tokenize and upload one generated chunk; both find what an earlier attempt left and do only the rest."""
    if record.done:
        await tokenize(record, run.target, run.spec.tokenization, run.spec.sampling)
    return record, await upload_chunk(run.store, run.paths.run_id, record)


async def publication(run: Session, prompts: Prompts, done: Sequence[Done], made_now: Made) -> dict[str, Any]:
    """Write the report, then the manifest last; the run is over when the manifest is there.

    Raises GateError where too many prompts of the run have failed: nothing is published, and the run can be resumed.
    """
    records = [record for record, _ in done]
    counts = sum(record.done for record in records), sum(record.failed for record in records)
    judge(run, whole_run(*counts, run.spec.generation.breaker))
    await write_report(run.paths)
    made = await publish(
        run.store, run.paths, [chunk for _, chunk in done], run.facts, run.spec.publish.dataset, run.lease
    )
    finish_run(run.paths)
    text = f"Snapshot `{made['snapshot']}`, rows {made['rows']}: `{made['manifest']}`"
    text += f"\n\nCheck it with `regen verify {run.store.url}`."
    ui.markdown("published", text, f"Snapshot {made['snapshot']}")
    summary = summarize(run, prompts, records, made_now, made)
    run.note(summary=summary)
    return summary


async def nothing_to_do(run: Session, prompts: Prompts) -> dict[str, Any]:
    """Every usable prompt is published already: no server is started, no snapshot is made."""
    finish_run(run.paths)
    ui.markdown("report", f"Nothing new: {prompts.kept} usable prompts, all published.", "nothing new")
    manifest = f"{run.store.url}/manifest.json" if run.store.exists("manifest.json") else None
    return summarize(run, prompts, [], Made(), {"manifest": manifest})


def summarize(
    run: Session, prompts: Prompts, records: Sequence[ChunkRecord], now: Made, published: Mapping[str, Any]
) -> dict[str, Any]:
    """What a command's last line says. `completed`: answers made by this invocation; `done`: prompts that have one."""
    return {
        "run_id": run.paths.run_id,
        "run_dir": str(run.paths.run_dir),
        "adopted": run.adopted,
        "rows": prompts.rows,
        "kept": prompts.kept,
        "rejected": prompts.rejected,
        "duplicates": prompts.duplicates,
        "completed": now.answers,
        "done": prompts.answered + sum(record.done for record in records),
        "failed": prompts.failed + sum(record.failed for record in records),
        "output_tokens": now.output_tokens,
        "tok_s": round(now.output_tokens / now.seconds, 1) if now.seconds else 0.0,
        "manifest": published.get("manifest"),
        "snapshot": published.get("snapshot"),
    }


def add_up(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """An adopted run and the run for what came in since: the second's sums, both runs' work."""
    seconds = sum(r["output_tokens"] / r["tok_s"] for r in (first, second) if r["tok_s"])
    tokens = first["output_tokens"] + second["output_tokens"]
    shown = second if second["snapshot"] else first
    return {
        **second,
        "adopted": True,
        "completed": first["completed"] + second["completed"],
        "output_tokens": tokens,
        "tok_s": round(tokens / seconds, 1) if seconds else 0.0,
        **{name: shown[name] for name in ("run_id", "run_dir", "snapshot")},
    }
