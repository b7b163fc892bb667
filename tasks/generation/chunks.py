"""Chunks as labels: which rows are open, what is still missing in each, and their files."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from tasks.generation.conversation import TurnPolicy
from tasks.generation.jobs import Job
from tasks.generation.journal import Journal
from tasks.generation.plan import DONE, FAILED, Plan, read_record
from tasks.generation.prompts import PromptFile, Row
from tasks.generation.sampling import Sampler
from tasks.generation.settings import GenerationSettings
from tasks.generation.writer import RowLog, answer_message, finalize, index_rows
from tasks.records import ChunkRecord
from tasks.runs import RunPaths


@dataclass(slots=True)
class Chunk:
    """One open chunk. `states` has a byte a row: 0 pending, 1 done, 2 failed."""

    index: int
    rows: tuple[int, int]
    directory: Path
    journal: Journal
    states: bytearray
    logs: dict[int, RowLog]
    before: dict[str, int] = field(default_factory=dict)  # attempts of terminal failures that are run again
    fed: bool = False
    finalizing: bool = False

    @property
    def pending(self) -> int:
        """Rows without an answer or a terminal failure."""
        return self.states.count(0)

    @property
    def complete(self) -> bool:
        """Every row is accounted for."""
        return self.fed and self.pending == 0


class ChunkStore:
    """Opens, feeds and finalizes chunks; every method but the properties may block (call them in a thread)."""

    def __init__(
        self, paths: RunPaths, prompts: PromptFile, plan: Plan, settings: GenerationSettings, identity: dict[str, Any]
    ) -> None:
        self._paths, self._prompts, self.plan = paths, prompts, plan
        self._settings, self._identity = settings, identity
        self._policy: TurnPolicy = settings.turn_policy

    def finished(self, index: int) -> ChunkRecord | None:
        """The record of a chunk that needs nothing more; clears what a crash after its last rename left behind."""
        directory = self._paths.chunk(index)
        record = read_record(directory)
        if record is None or (directory / "journal.retry").exists():
            return None
        if self._settings.retry_failed and record.failed:
            return None
        with contextlib.suppress(FileNotFoundError):
            (directory / "journal").unlink()
        return record

    def open(self, index: int) -> Chunk:
        """Open the journal and find what is missing. A finished chunk with failures is opened to run those again."""
        directory, rows = self._paths.chunk(index), self.plan.range(index)
        again = (directory / "chunk.json").exists()
        journal = Journal.open(directory / ("journal.retry" if again else "journal"), self._identity)
        logs = index_rows(journal)
        states = bytearray(rows[1] - rows[0])
        before: dict[str, int] = {}
        if again:
            before = self._mark_earlier(directory, rows, states)
        for row, log in logs.items():
            if log.last is not None:
                states[row] = DONE
            elif log.failed is not None and not (self._settings.retry_failed and not again):
                states[row] = FAILED
        return Chunk(index, rows, directory, journal, states, logs, before)

    def _mark_earlier(self, directory: Path, rows: tuple[int, int], states: bytearray) -> dict[str, int]:
        done = set(pl.read_parquet(directory / "completions.parquet", columns=["prompt_id"])["prompt_id"])
        failed = pl.read_parquet(directory / "failed.parquet", columns=["prompt_id", "attempts"])
        for row, identifier in enumerate(self._prompts.column("prompt_id", *rows)):
            if identifier in done:
                states[row] = DONE
        return dict(zip(failed["prompt_id"], failed["attempts"], strict=True))

    def rows(self, chunk: Chunk) -> Iterator[list[Row]]:
        """Missing rows in batches. The last chunks go longest first where old lengths are known: a short tail."""
        batches = self._prompts.read(*chunk.rows, skip=bytes(chunk.states))
        if chunk.index < self.plan.chunks - 2:
            yield from batches
            return
        rows = [row for batch in batches for row in batch]
        rows.sort(key=lambda row: -(row.prompt.old_output_tokens or 0))
        yield from (rows[at : at + 64] for at in range(0, len(rows), 64))

    def job(self, chunk: Chunk, row: Row, sampler: Sampler) -> Job:
        """A row as it stands: accepted turns are kept, attempts go on where they were."""
        prompt = row.prompt
        job = Job(chunk.index, row.position - chunk.rows[0], prompt, sampler.arm(prompt.prompt_id))
        job.attempt = job.first_attempt = job.attempts_total = chunk.before.get(prompt.prompt_id, 0)
        log = chunk.logs.get(job.row)
        if log is None:
            return job
        while job.turn in log.turns:
            job.answers.append(answer_message(chunk.journal.load(log.turns[job.turn])))
            job.next_turn()
        for entry in log.attempts or ():
            record = chunk.journal.load(entry)
            job.attempts_total += 1
            if record["turn"] == job.turn:
                job.attempt = record["attempt"] + 1
                job.max_tokens = record.get("next_max_tokens")
        if log.failed is not None:  # run again by request: other seeds, fresh attempts
            job.attempt += 1
            job.first_attempt = job.attempt
        return job

    def finalize(self, chunk: Chunk) -> ChunkRecord:
        """Write the chunk's files, then drop its journal. Can be repeated after an error."""
        chunk.journal.sync()
        record = finalize(chunk.index, chunk.directory, chunk.journal, self._prompts, chunk.rows, self._policy)
        chunk.journal.close()
        with contextlib.suppress(FileNotFoundError):
            chunk.journal.path.unlink()
        return record
