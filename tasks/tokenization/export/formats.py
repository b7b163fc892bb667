"""One writer a trainer. Fields are exactly those that the trainer's published code reads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import DatasetError
from tasks.tokenization.export import filters
from tasks.tokenization.export.shards import json_lines
from tasks.tokenization.export.source import ChatRow, Source

Written = tuple[int, list[Path]]
"""(rows, files)."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """How one trainer reads: writer, default rows a file, its filter and the length it cuts at by default.

    `tokens` and `completions` are the columns that the writer takes from those files, besides the arrays.
    """

    write: Callable[[Source, Path, int], Written]
    shard_rows: int
    dropped: filters.Dropped
    length: int | None
    note: str
    per_prompt: bool = False
    tokens: tuple[str, ...] = ("prompt_id", "turn")
    completions: tuple[str, ...] = ("prompt_id", "messages", "tools", "turns")


def _rows(batch: pa.RecordBatch) -> Iterator[tuple[Any, Any]]:
    """(input_ids, loss_mask) as NumPy views."""
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    values, bits = ids.values.to_numpy(), mask.values.to_numpy()
    starts, bit_starts = ids.offsets.to_numpy(), mask.offsets.to_numpy()
    for row in range(batch.num_rows):
        yield values[starts[row] : starts[row + 1]], bits[bit_starts[row] : bit_starts[row + 1]]


def write_specforge(source: Source, out: Path, shard_rows: int) -> Written:
    """JSONL `input_ids`, `loss_mask` for data.prompts_path."""
    with json_lines(out, shard_rows) as lines:
        for batch in source.batches():
            for ids, mask in _rows(batch):
                lines.write({"input_ids": ids, "loss_mask": mask})
    return lines.rows, lines.files


def write_speculators(source: Source, out: Path, shard_rows: int) -> Written:
    """JSONL as `speculators regenerate-responses` writes it, for `prepare-data --data`."""
    index = 0
    with json_lines(out, shard_rows) as lines:
        for part in source.parts:
            details = source.turn_details(part)
            for batch in Source(part.tokens).batches("finish_reason"):
                names = zip(*(batch.column(n).to_pylist() for n in ("prompt_id", "turn", "finish_reason")), strict=True)
                for (prompt_id, turn, finish), (ids, mask) in zip(names, _rows(batch), strict=True):
                    known = details.get((prompt_id, turn), {})
                    lines.write(_speculators_row(index, prompt_id, turn, finish, ids, mask, known))
                    index += 1
    return lines.rows, lines.files


def _speculators_row(
    index: int, prompt_id: str, turn: int, finish: str, ids: Any, mask: Any, known: dict[str, Any]
) -> dict[str, Any]:
    sampled = int(np.count_nonzero(mask))
    usage = {"prompt_tokens": len(ids) - sampled, "completion_tokens": sampled, "total_tokens": len(ids)}
    sampling = {name: known.get(name) for name in ("temperature", "top_p", "top_k", "seed")}
    text = "\n\n".join(part for part in (known.get("reasoning_content"), known.get("content")) if part)
    return {
        "id": f"{prompt_id}_gen{turn}",
        "primary_id": prompt_id,
        "input_ids": ids,
        "loss_mask": mask,
        "text": text,
        "metadata": {
            "idx": index,
            "finish_reason": finish,
            "is_tool_call": finish == "tool_calls",
            "usage": usage,
            "endpoint": known.get("server") or "",
            "sampling_params": sampling,
        },
    }


def write_prepared(source: Source, out: Path, shard_rows: int) -> Written:
    """The Hugging Face folder that `speculators prepare-data` would write: int64 lists and `seq_len`."""
    from datasets import Dataset, Features, List, Value, concatenate_datasets, disable_progress_bars

    disable_progress_bars()
    features = Features(
        {"input_ids": List(Value("int64")), "loss_mask": List(Value("int64")), "seq_len": Value("int64")}
    )
    staging = out.with_name(f".{out.name}.staging")
    staging.mkdir(parents=True, exist_ok=True)
    try:
        shards = list(_arrow_shards(source, staging, shard_rows, features.arrow_schema))
        parts = [Dataset.from_file(str(path)) for path in shards]
        whole = (
            concatenate_datasets(parts) if parts else Dataset.from_dict({n: [] for n in features}, features=features)
        )
        whole.save_to_disk(str(out), num_shards=max(1, len(shards)))
        return whole.num_rows, sorted(out.glob("*.arrow"))
    finally:
        for path in staging.glob("*"):
            path.unlink()
        staging.rmdir()


def _arrow_shards(source: Source, folder: Path, shard_rows: int, schema: pa.Schema) -> Iterator[Path]:
    """Arrow stream files of at most about `shard_rows` rows."""
    path, writer, rows = folder / "x", None, 0
    for batch in source.batches():
        if writer is None:
            path = folder / f"{rows:012d}-{len(list(folder.iterdir())):05d}.arrow"
            writer, rows = pa.ipc.new_stream(str(path), schema), 0
        lengths = batch.column("input_ids").value_lengths()
        arrays = [batch.column(n).cast(schema.field(n).type) for n in ("input_ids", "loss_mask")]
        writer.write_batch(pa.RecordBatch.from_arrays([*arrays, lengths.cast(pa.int64())], schema=schema))
        rows += batch.num_rows
        if rows >= shard_rows:
            writer.close()
            writer = None
            yield path
    if writer is not None:
        writer.close()
        yield path


def _openai(message: dict[str, Any]) -> dict[str, Any]:
    """Only the fields that are set; tool calls as a list."""
    kept = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in kept:
        kept["tool_calls"] = orjson.loads(kept["tool_calls"])
    return kept


def _inline(message: dict[str, Any], family: Any) -> dict[str, Any]:
    """Role and content only, with the thinking inside the content: these trainers read no other field."""
    content, reasoning = message["content"] or "", message["reasoning_content"]
    if reasoning and message["role"] == "assistant":
        if not family.get("think_close"):
            raise DatasetError(
                "the answers have reasoning, but their token files do not record how the target marks it; "
                "tokenize them again with this version, or export for a trainer that reads reasoning_content"
            )
        opened = f"{family['think_open']}{family['think_after_open']}{reasoning}{family['think_before_close']}"
        content = f"{opened}{family['think_close']}{family['think_after_close']}{content}"
    plain: dict[str, Any] = {"role": message["role"], "content": content}
    if message["tool_calls"]:
        plain["tool_calls"] = orjson.loads(message["tool_calls"])
    return plain


def write_specforge_raw(source: Source, out: Path, shard_rows: int) -> Written:
    """JSONL `id`, `conversations`, `tools` for data.train_data_path: any other column would go into the template."""

    def line(row: ChatRow) -> dict[str, Any]:
        turns = []
        for message in row.messages:
            turn = {name: message[name] for name in ("role", "content", "reasoning_content")}
            turns.append({**turn, "tool_calls": message["tool_calls"]} if message["tool_calls"] else turn)
        return {"id": f"{row.prompt_id}_{row.turn}", "conversations": turns, "tools": row.tools or "[]"}

    return _write_chats(source, out, shard_rows, line, every_turn=True)


def write_model_optimizer(source: Source, out: Path, shard_rows: int) -> Written:
    """JSONL `messages` (OpenAI form), `conversation_id`."""

    def line(row: ChatRow) -> dict[str, Any]:
        return {"messages": [_openai(message) for message in row.messages], "conversation_id": row.prompt_id}

    return _write_chats(source, out, shard_rows, line)


def write_inline(source: Source, out: Path, shard_rows: int) -> Written:
    """JSONL `id`, `conversations` (role, content) for TorchSpec, DeepSpec and AngelSlim."""

    def line(row: ChatRow) -> dict[str, Any]:
        return {"id": row.prompt_id, "conversations": [_inline(message, source.family) for message in row.messages]}

    return _write_chats(source, out, shard_rows, line)


def _write_chats(
    source: Source, out: Path, shard_rows: int, line: Callable[[ChatRow], dict[str, Any]], every_turn: bool = False
) -> Written:
    with json_lines(out, shard_rows) as lines:
        for row in source.chats(every_turn):
            lines.write(line(row))
    return lines.rows, lines.files


MESSAGES = pa.schema(
    [
        pa.field(
            "messages",
            pa.large_list(
                pa.struct([(n, pa.string()) for n in ("role", "content", "reasoning_content", "tool_calls")])
            ),
        )
    ]
)


def write_automodel(source: Source, out: Path, shard_rows: int) -> Written:
    """Parquet `shard-%06d.parquet` with `messages`; tool calls stay JSON text, so that the struct has one type."""
    files: list[Path] = []
    pending: list[dict[str, Any]] = []
    rows = 0

    def flush() -> None:
        path = out / f"shard-{len(files):06d}.parquet"
        part = path.with_name(f".{path.name}.part")
        pq.write_table(pa.Table.from_pylist(pending, schema=MESSAGES), part, compression="zstd")
        part.replace(path)
        files.append(path)
        pending.clear()

    for row in source.chats(every_turn=False):
        pending.append({"messages": row.messages})
        rows += 1
        if len(pending) >= shard_rows:
            flush()
    if pending:
        flush()
    return rows, files


_CUT = "rows longer than the trainer's own window are cut there"
TRAINERS: dict[str, Trainer] = {
    "specforge": Trainer(
        write_specforge,
        50_000,
        filters.specforge,
        None,
        f"data.prompts_path, one file a run: read into RAM; {_CUT}",
        tokens=(),
        completions=(),
    ),
    "specforge-raw": Trainer(
        write_specforge_raw,
        50_000,
        filters.specforge,
        None,
        "data.train_data_path; one row a turn: set data.train_only_last_turn",
    ),
    "speculators": Trainer(
        write_speculators,
        100_000,
        filters.speculators,
        8192,
        "prepare-data --data; --seq-length",
        tokens=("prompt_id", "turn", "finish_reason"),
        completions=("prompt_id", "turns"),
    ),
    "speculators-prepared": Trainer(
        write_prepared,
        100_000,
        filters.speculators,
        8192,
        "a save_to_disk folder; " + _CUT,
        tokens=(),
        completions=(),
    ),
    "model-optimizer": Trainer(write_model_optimizer, 100_000, filters.model_optimizer, None, "data.data_path", True),
    "automodel": Trainer(write_automodel, 50_000, filters.nothing, None, "a folder of shard-%06d.parquet", True),
    "torchspec": Trainer(write_inline, 100_000, filters.two_blocks, None, "dataset.prompt_key conversations", True),
    "deepspec": Trainer(write_inline, 100_000, filters.deepspec, None, "conversations", True),
    "angelslim": Trainer(write_inline, 100_000, filters.two_blocks, None, "id and conversations", True),
}
"""By the name on the command line. `per_prompt` trainers get one row a conversation."""
