"""Which rows belong to which chunk, and which are done. Ids decide, never counts."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from tasks.errors import SpecError
from tasks.generation.journal import Kind, scan
from tasks.generation.prompts import PromptFile
from tasks.records import ChunkRecord
from tasks.runs import RunPaths, read_json, write_json

MOST_CHUNKS = 180  # three task runs a chunk stay under 600 in all
DONE, FAILED = 1, 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Chunks of `rows_per_chunk` consecutive rows of prompts.parquet; fixed at the first start of a run."""

    rows: int
    rows_per_chunk: int

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return math.ceil(self.rows / self.rows_per_chunk) if self.rows else 0

    def range(self, index: int) -> tuple[int, int]:
        """Rows [first, last) of chunk `index`."""
        return index * self.rows_per_chunk, min(self.rows, (index + 1) * self.rows_per_chunk)


def make_plan(paths: RunPaths, rows: int, chunk_rows: int, fingerprint: str | None = None) -> Plan:
    """The plan on disk if there is one (other settings must not move rows between chunks), else a new one.

    Raises SpecError when chunks exist that were planned over other prompts: their rows would mean other questions.
    """
    file = paths.chunks / "plan.json"
    recorded = read_json(file) if file.exists() else {}
    same_prompts = fingerprint is None or recorded.get("fingerprint") in (None, fingerprint)
    if recorded.get("rows") == rows and same_prompts:
        return Plan(rows, int(recorded["rows_per_chunk"]))
    if recorded and any(paths.chunks.glob("[0-9]*")):
        raise SpecError(
            f"{paths.prompts} changed under an unfinished run ({recorded.get('rows')} rows there, {rows} now). "
            "Restore it, or start a new run."
        )
    plan = Plan(rows, max(1, chunk_rows, math.ceil(rows / MOST_CHUNKS)))
    write_json(file, {**asdict(plan), "fingerprint": fingerprint})
    return plan


def read_record(directory: Path) -> ChunkRecord | None:
    """chunk.json of a finished chunk; None when it is not finished (the Parquet files are renamed before it)."""
    file = directory / "chunk.json"
    if not file.exists() or not (directory / "completions.parquet").exists():
        return None
    value = json.loads(file.read_bytes())
    names = ChunkRecord.__dataclass_fields__
    value |= {"directory": str(directory), "completions_path": str(directory / "completions.parquet")}
    return ChunkRecord(**{name: value[name] for name in names if name in value})


def journal_states(path: Path, rows: int) -> bytearray:
    """Per row of a chunk: 0 pending, 1 done, 2 failed; read from an unfinished chunk's journal without opening it."""
    states = bytearray(rows)
    if path.exists():
        for entry in scan(memoryview(path.read_bytes()), path).entries:
            if entry.kind is Kind.LAST:
                states[entry.row] = DONE
            elif entry.kind is Kind.FAILED and states[entry.row] != DONE:
                states[entry.row] = FAILED
    return states


@dataclass(frozen=True, slots=True)
class Ledger:
    """Every id of a run by state: input = done + failed + pending, each id once."""

    done: frozenset[str]
    failed: frozenset[str]
    pending: frozenset[str]


def ledger(paths: RunPaths, prompts_path: Path | None = None) -> Ledger:
    """Read the whole run from disk (for checks, reports and proofs; not on the engine's path)."""
    prompts = PromptFile(prompts_path or paths.prompts)
    begun = (paths.chunks / "plan.json").exists()
    plan = make_plan(paths, prompts.rows, 1, prompts.fingerprint) if begun else Plan(prompts.rows, max(1, prompts.rows))
    done: set[str] = set()
    failed: set[str] = set()
    everything: set[str] = set()
    for index in range(plan.chunks):
        ids = prompts.column("prompt_id", *plan.range(index))
        everything.update(ids)
        good, bad = _chunk_ids(paths.chunk(index), ids)
        done |= good
        failed |= bad
    return Ledger(frozenset(done), frozenset(failed), frozenset(everything - done - failed))


def _chunk_ids(directory: Path, ids: list[str]) -> tuple[set[str], set[str]]:
    done: set[str] = set()
    failed: set[str] = set()
    if (directory / "chunk.json").exists():
        done.update(pl.read_parquet(directory / "completions.parquet", columns=["prompt_id"])["prompt_id"])
        failed.update(pl.read_parquet(directory / "failed.parquet", columns=["prompt_id"])["prompt_id"])
    for name in ("journal", "journal.retry"):
        for identifier, state in zip(ids, journal_states(directory / name, len(ids)), strict=True):
            if state == DONE:
                done.add(identifier)
                failed.discard(identifier)
            elif state == FAILED and identifier not in done:
                failed.add(identifier)
    return done, failed


def done_ids(paths: RunPaths, prompts_path: Path | None = None) -> frozenset[str]:
    """Ids that are answered on disk, finished chunks and journals alike."""
    return ledger(paths, prompts_path).done


def pending_ids(paths: RunPaths, prompts_path: Path | None = None) -> frozenset[str]:
    """Ids that a resumed run will ask for (terminal failures are not among them)."""
    return ledger(paths, prompts_path).pending


def finished(paths: RunPaths, plan: Plan) -> Iterator[tuple[int, ChunkRecord]]:
    """Finished chunks, by their small records only."""
    for index in range(plan.chunks):
        record = read_record(paths.chunk(index))
        if record is not None:
            yield index, record


def identity_of(paths: RunPaths, parts: dict[str, Any]) -> dict[str, Any]:
    """What a journal must have in common with the run: the spec's identity, or the parts when there is no spec.json."""
    if paths.spec.exists():
        spec = read_json(paths.spec)
        if spec.get("identity_digest"):
            return {"identity_digest": spec["identity_digest"]}
    return parts
