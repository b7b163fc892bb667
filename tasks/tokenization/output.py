"""The files of one chunk: streamed row groups under temporary names, then their own names all at once."""

import json
import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.records import TokenRecord
from tasks.runs import sync_directory
from tasks.tokenization.packing import Packer
from tasks.tokenization.rows import Built
from tasks.tokenization.schema import PACKED, REJECTED, TOKENS

GROUP_ROWS = 512
"""Rows a row group: a few MB of ids, so that readers stream."""


@dataclass(slots=True)
class _Sums:
    rows: int = 0
    rejected: int = 0
    supervised: int = 0
    exact: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    largest_difference: int = 0


class Output:
    """The files of one chunk under temporary names; `finish` gives them their own."""

    def __init__(self, tokens: Path, pack_to: int | None) -> None:
        self._paths = {"tokens": tokens, "rejected": tokens.with_name("tokens_rejected.parquet")}
        self._packer = Packer(pack_to) if pack_to else None
        if self._packer:
            self._paths["packed"] = tokens.with_name("packed.parquet")
        self._sums = _Sums()
        self._stack = ExitStack()
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._waiting: dict[str, list[pa.RecordBatch]] = {name: [] for name in self._paths}

    def __enter__(self) -> "Output":
        schemas = {"tokens": TOKENS, "rejected": REJECTED, "packed": PACKED}
        for name, path in self._paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            writer = pq.ParquetWriter(self._temporary(path), schemas[name], compression="zstd", compression_level=3)
            self._writers[name] = self._stack.enter_context(writer)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        for path in self._paths.values():
            self._temporary(path).unlink(missing_ok=True)

    @staticmethod
    def _temporary(path: Path) -> Path:
        return path.with_name(f".{path.name}.{os.getpid()}")

    def write(self, built: Built) -> None:
        """Append one batch."""
        sums, tokens = self._sums, built.tokens
        sums.rows += tokens.num_rows
        sums.rejected += built.rejected.num_rows
        sums.supervised += pc.sum(tokens.column("n_supervised")).as_py() or 0
        sums.exact += pc.sum(tokens.column("ids_exact")).as_py() or 0
        sums.reasons.update(built.rejected.column("reason").to_pylist())
        sums.methods.update(built.methods)
        differences = pc.max(pc.abs(tokens.column("retokenized_difference"))).as_py() or 0
        sums.largest_difference = max(sums.largest_difference, differences)
        self._append("tokens", tokens)
        self._append("rejected", built.rejected)
        if self._packer:
            self._append("packed", self._packer.add(tokens))

    def _append(self, name: str, batch: pa.RecordBatch) -> None:
        waiting = self._waiting[name]
        waiting.append(batch)
        if sum(batch.num_rows for batch in waiting) >= GROUP_ROWS:
            self._flush(name)

    def _flush(self, name: str) -> None:
        """Write what waits as one row group."""
        waiting = [batch for batch in self._waiting[name] if batch.num_rows]
        self._waiting[name] = []
        if waiting:
            self._writers[name].write_table(pa.Table.from_batches(waiting).combine_chunks())

    def finish(self, index: int, details: dict[str, Any]) -> TokenRecord:
        """Close, make durable, and give the files their names."""
        sums = self._sums
        if self._packer:
            self._append("packed", self._packer.finish())
        for name in self._paths:
            self._flush(name)
        more = {"mask_methods": dict(sums.methods), "largest_retokenized_difference": sums.largest_difference}
        record = TokenRecord(
            index=index,
            tokens_path=str(self._paths["tokens"]),
            rows=sums.rows,
            rejected=sums.rejected,
            supervised_tokens=sums.supervised,
            exact_rows=sums.exact,
            reasons=dict(sorted(sums.reasons.items())),
            details={**more, **details},
        )
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in details.items()}
        texts["record"] = json.dumps(asdict(record))
        self._writers["tokens"].add_key_value_metadata({f"regen.{name}": text for name, text in texts.items()})
        self._stack.close()
        for path in self._paths.values():
            temporary = self._temporary(path)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        sync_directory(self._paths["tokens"].parent)
        return record
