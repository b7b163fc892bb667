"""prompts.parquet as a stream: chunk k is rows [k*n, (k+1)*n); never more than a batch in memory."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from tasks.errors import DatasetError
from tasks.records import Message, Prompt

BATCH_ROWS = 64
_MESSAGE_FIELDS = tuple(f.name for f in fields(Message))


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and its position in prompts.parquet."""

    position: int
    prompt: Prompt


class PromptFile:
    """Reads row ranges. The file is sorted by prompt_id, so any prefix is a random sample."""

    def __init__(self, path: Path) -> None:
        try:
            self._metadata = pq.read_metadata(path)
        except (OSError, pa.ArrowException) as error:
            raise DatasetError(f"cannot read {path}: {error}; run the validation stage again") from error
        self.path = path
        self.rows: int = self._metadata.num_rows
        self._starts = [0]
        for index in range(self._metadata.num_row_groups):
            self._starts.append(self._starts[-1] + self._metadata.row_group(index).num_rows)

    @property
    def fingerprint(self) -> str:
        """Tells another prompts file by its footer alone: rows and range of ids of every row group."""
        parts = []
        for index in range(self._metadata.num_row_groups):
            group = self._metadata.row_group(index)
            columns = (group.column(at) for at in range(group.num_columns))
            statistics = next((c.statistics for c in columns if c.path_in_schema == "prompt_id"), None)
            bounds = (statistics.min, statistics.max) if statistics is not None and statistics.has_min_max else ()
            parts.append(f"{group.num_rows}{bounds}")
        return xxhash.xxh3_128_hexdigest("|".join(parts).encode())

    def _groups(self, first: int, last: int) -> list[int]:
        pairs = zip(self._starts, self._starts[1:], strict=False)
        return [index for index, (low, high) in enumerate(pairs) if low < last and high > first]

    def batches(self, first: int, last: int, columns: list[str] | None = None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(position of its first row, batch) over rows [first, last)."""
        groups = self._groups(first, last)
        if not groups:
            return
        position = self._starts[groups[0]]
        with pq.ParquetFile(self.path, metadata=self._metadata) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=groups, columns=columns):
                low, high = max(first, position), min(last, position + batch.num_rows)
                if low < high:
                    yield low, batch.slice(low - position, high - low)
                position += batch.num_rows
                if position >= last:
                    return

    def read(self, first: int, last: int, skip: bytes | bytearray | None = None) -> Iterator[list[Row]]:
        """Rows [first, last) in batches; `skip[i]` non-zero leaves out row first + i."""
        for start, batch in self.batches(first, last):
            wanted = [i for i in range(batch.num_rows) if not (skip and skip[start + i - first])]
            if wanted:
                part = batch if len(wanted) == batch.num_rows else batch.take(pa.array(wanted))
                values = part.to_pylist()
                yield [Row(start + i, to_prompt(value)) for i, value in zip(wanted, values, strict=True)]

    def column(self, name: str, first: int, last: int) -> list[Any]:
        """One column of rows [first, last)."""
        return [value for _, batch in self.batches(first, last, [name]) for value in batch.column(0).to_pylist()]


def to_prompt(value: dict[str, Any]) -> Prompt:
    """A row of prompts.parquet as a Prompt."""
    messages = tuple(
        Message(**{name: message.get(name) for name in _MESSAGE_FIELDS if message.get(name) is not None})
        for message in value["messages"]
    )
    return Prompt(
        value["prompt_id"],
        messages,
        value.get("tools"),
        value.get("sample_index") or 0,
        value.get("source") or "",
        -1 if value.get("row") is None else value["row"],
        value.get("regenerate_reason"),
        value.get("old_output_tokens"),
    )


MESSAGE_TYPE = pa.struct([(name, pa.large_string()) for name in _MESSAGE_FIELDS])
PROMPT_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("messages", pa.list_(MESSAGE_TYPE)),
        ("tools", pa.large_string()),
        ("sample_index", pa.int32()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("regenerate_reason", pa.string()),
        ("old_output_tokens", pa.int32()),
    ]
)


def write_prompts(path: Path, prompts: list[Prompt], row_group: int = 5000) -> None:
    """Small prompts files for tests, probes and demos; validation writes the real ones. Sorts by prompt_id."""
    ordered = sorted(prompts, key=lambda prompt: prompt.prompt_id)
    names = PROMPT_SCHEMA.names
    rows = [
        {**{n: getattr(p, n) for n in names if n != "messages"}, "messages": [m.as_dict() for m in p.messages]}
        for p in ordered
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA), path, row_group_size=row_group)


def tools_of(prompt: Prompt) -> list[dict[str, Any]] | None:
    """The tools as the server gets them. Raises ValueError when they are not a JSON list."""
    if not prompt.tools:
        return None
    value = json.loads(prompt.tools)
    if not isinstance(value, list):
        raise ValueError(f"tools are {type(value).__name__}, a list was expected")
    return value or None
