"""Finished chunk: journal → completions.parquet, failed.parquet, chunk.json; each file appears whole or not at all."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import StorageError
from tasks.generation.conversation import TurnPolicy, next_step
from tasks.generation.journal import Entry, Journal, Kind, replay
from tasks.generation.prompts import MESSAGE_TYPE, PromptFile, Row
from tasks.records import ChunkRecord, Message
from tasks.runs import sync_directory, write_json

ROWS_PER_GROUP = 512

TURN_TYPE = pa.struct(
    [
        ("turn", pa.int32()),
        ("prompt_token_ids", pa.large_list(pa.int32())),
        ("token_ids", pa.large_list(pa.int32())),
        ("content", pa.large_string()),
        ("reasoning_content", pa.large_string()),
        ("tool_calls", pa.large_string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("ids_source", pa.string()),
        ("accept_length", pa.float32()),
        ("latency_s", pa.float32()),
        ("attempt", pa.int32()),
        ("server", pa.string()),
        ("seed", pa.int64()),
        ("max_tokens", pa.int32()),
        ("notes", pa.list_(pa.string())),
    ]
)
COMPLETIONS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("messages", pa.list_(MESSAGE_TYPE)),
        ("tools", pa.large_string()),
        ("turns", pa.list_(TURN_TYPE)),
        ("thinking", pa.bool_()),
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("top_k", pa.int32()),
        ("output_tokens", pa.int64()),
        ("attempts", pa.int32()),
        ("cut_reason", pa.string()),
        ("ledger", pa.large_string()),
    ]
)
FAILURES = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("reason", pa.string()),
        ("detail", pa.large_string()),
        ("attempts", pa.int32()),
        ("turn", pa.int32()),
        ("ledger", pa.large_string()),
    ]
)
_TURN_NAMES = tuple(field.name for field in TURN_TYPE)


@dataclass(slots=True)
class RowLog:
    """Where one row's records lie in the journal."""

    turns: dict[int, Entry]
    last: Entry | None = None
    failed: Entry | None = None
    attempts: list[Entry] | None = None


def index_rows(journal: Journal) -> dict[int, RowLog]:
    """Records by row; a turn written twice counts once (the later one), success beats failure."""
    rows: dict[int, RowLog] = defaultdict(lambda: RowLog({}))
    for entry in replay(journal.entries):
        log = rows[entry.row]
        if entry.kind is Kind.ATTEMPT:
            log.attempts = [*(log.attempts or ()), entry]
        elif entry.kind is Kind.FAILED:
            log.failed = entry
        else:
            log.turns[entry.turn] = entry
            log.last = entry if entry.kind is Kind.LAST else log.last
    return rows


class _File:
    """Parquet under a temporary name; `commit` makes it durable and renames."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._writer = pq.ParquetWriter(self._temporary, schema, compression="zstd")
        self._batches: list[pa.RecordBatch] = []
        self.rows = 0

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.add_batch(pa.RecordBatch.from_pylist(rows, schema=self._schema))

    def add_batch(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self.rows += batch.num_rows
        if sum(b.num_rows for b in self._batches) >= ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._batches:
            self._writer.write_table(pa.Table.from_batches(self._batches, self._schema))
            self._batches = []

    def commit(self) -> None:
        self._flush()
        self._writer.close()
        handle = os.open(self._temporary, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self._temporary.replace(self._path)

    def discard(self) -> None:
        self._writer.close()
        self._temporary.unlink(missing_ok=True)


def finalize(
    index: int, directory: Path, journal: Journal, prompts: PromptFile, rows: tuple[int, int], policy: TurnPolicy
) -> ChunkRecord:
    """Write the chunk's files from its journal (and what a `retry_failed` run finds already there).

    Raises StorageError when the disk refuses; the journal is then untouched and the call can be repeated.
    """
    logs = index_rows(journal)
    try:
        return _write(index, directory, journal, prompts, rows, policy, logs)
    except OSError as error:
        raise StorageError(f"cannot write {directory}: {error.strerror or error}; free space, then resume") from error


def _write(
    index: int,
    directory: Path,
    journal: Journal,
    prompts: PromptFile,
    rows: tuple[int, int],
    policy: TurnPolicy,
    logs: dict[int, RowLog],
) -> ChunkRecord:
    good, bad = _File(directory / "completions.parquet", COMPLETIONS), _File(directory / "failed.parquet", FAILURES)
    reasons: Counter[str] = Counter()
    tokens = 0
    try:
        earlier: set[str] = set()
        if directory.joinpath("chunk.json").exists():
            tokens += _keep_earlier(good, directory / "completions.parquet", earlier)
        skip = bytearray(0 if row in logs else 1 for row in range(rows[1] - rows[0]))
        for batch in prompts.read(*rows, skip=skip):
            done, failed = _rows(batch, rows[0], logs, journal, policy, earlier)
            tokens += sum(row["output_tokens"] for row in done)
            reasons.update(row["reason"] for row in failed)
            if done:
                good.add(done)
            if failed:
                bad.add(failed)
        good.commit()
        bad.commit()
    except BaseException:
        good.discard()
        bad.discard()
        raise
    record = ChunkRecord(
        index,
        str(directory),
        rows[1] - rows[0],
        good.rows,
        bad.rows,
        tokens,
        str(directory / "completions.parquet"),
        dict(reasons),
    )
    sync_directory(directory)
    write_json(directory / "chunk.json", record)
    return record


def _keep_earlier(good: _File, path: Path, earlier: set[str]) -> int:
    """Copy what a finished chunk already holds; a crash may have left rows both there and in the journal."""
    tokens = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=64):
            good.add_batch(batch.cast(COMPLETIONS))
            tokens += int(sum(batch.column("output_tokens").to_pylist()))
            earlier.update(batch.column("prompt_id").to_pylist())
    return tokens


def _rows(
    batch: list[Row],
    first: int,
    logs: dict[int, RowLog],
    journal: Journal,
    policy: TurnPolicy,
    earlier: set[str],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    done, failed = [], []
    for row in batch:
        log = logs.get(row.position - first)
        if log is None or row.prompt.prompt_id in earlier:
            continue
        prompt = row.prompt
        common = {
            "prompt_id": prompt.prompt_id,
            "sample_index": prompt.sample_index,
            "source": prompt.source,
            "row": prompt.row,
            "ledger": orjson.dumps([journal.load(entry) for entry in log.attempts or ()]).decode(),
        }
        if log.last is not None:
            done.append(common | _completion(row, list(_turns(log, journal)), policy))
        elif log.failed is not None:
            failed.append(common | journal.load(log.failed))
    return done, failed


def _turns(log: RowLog, journal: Journal) -> Iterator[dict[str, Any]]:
    assert log.last is not None
    for turn in range(log.last.turn + 1):
        yield journal.load(log.turns[turn])


def _completion(row: Row, turns: list[dict[str, Any]], policy: TurnPolicy) -> dict[str, Any]:
    answers = [answer_message(turn) for turn in turns]
    step = next_step(row.prompt.messages, answers, policy)
    last = turns[-1]
    return {
        "messages": [message.as_dict() for message in step.history],
        "tools": row.prompt.tools,
        "turns": [{name: turn.get(name) for name in _TURN_NAMES} for turn in turns],
        "thinking": last["thinking"],
        "temperature": last["temperature"],
        "top_p": last["top_p"],
        "top_k": last["top_k"],
        "output_tokens": sum(turn.get("completion_tokens") or 0 for turn in turns),
        "attempts": sum(turn["attempt"] + 1 for turn in turns),
        "cut_reason": last.get("cut_reason"),
    }


def answer_message(turn: dict[str, Any]) -> Message:
    """The assistant message that a journalled turn stands for."""
    return Message("assistant", turn["content"] or "", turn.get("reasoning_content"), turn.get("tool_calls"))
