"""completions.parquet in, tokens.parquet and tokens_rejected.parquet out."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.errors import DatasetError
from tasks.records import TokenRecord
from tasks.runs import sync_directory
from tasks.settings import SamplingSettings, TargetSettings
from tasks.target.load import load_target
from tasks.target.text import TargetText
from tasks.tokenization.fingerprint import digest, file_digest, fingerprint
from tasks.tokenization.packing import Packer
from tasks.tokenization.rows import Built
from tasks.tokenization.schema import MASK_CONVENTION, PACKED, REJECTED, TOKENS
from tasks.tokenization.settings import TokenizationSettings
from tasks.tokenization.workers import Job, build_all, worker_count

BATCH_ROWS = 256
"""Conversations a batch: a few MB of ids, and one row group of the output."""
INLINE_ROWS = 2048
"""Fewer conversations than this are tokenized in this process: starting others would take longer."""
COLUMNS = ("prompt_id", "messages", "tools", "turns", "thinking")


def tokenize_chunk(
    completions_path: Path,
    out_path: Path,
    target: TargetText | TargetSettings,
    settings: TokenizationSettings,
    sampling: SamplingSettings,
    *,
    index: int | None = None,
) -> TokenRecord:
    """Tokenize one chunk's completions; every assistant turn ends as a row or as a reject.

    Writes `out_path`, `tokens_rejected.parquet` and, when `pack_to` is set, `packed.parquet` beside it. Each file
    appears whole or not at all.
    A file made from the same bytes with the same fingerprint is reused. `index` defaults to the folder's number.
    Raises DatasetError when the completions cannot be read.
    """
    text = target if isinstance(target, TargetText) else load_target(target)
    if index is None:
        index = int(out_path.parent.name) if out_path.parent.name.isdigit() else 0
    print_of = fingerprint(text, settings, sampling.preserve_thinking)
    key = {"fingerprint": digest(print_of), "completions_sha256": _digest(completions_path)}
    known = _reusable(out_path, key)
    if known is not None:
        return TokenRecord(**{**known, "index": index, "tokens_path": str(out_path)})
    source = _open(completions_path)
    sent = datetime.fromtimestamp(completions_path.stat().st_mtime, UTC)
    job = Job(text.settings, settings, sampling.preserve_thinking, sent)
    workers = 1 if source.metadata.num_rows < INLINE_ROWS and not settings.workers else worker_count(settings)
    details = {"mask_convention": MASK_CONVENTION, "fingerprint_of": print_of, **key}
    with _Output(out_path, settings.pack_to) as output:
        for built in build_all(job, _batches(source), workers):
            output.write(built)
        return output.finish(index, details)


def _open(path: Path) -> pq.ParquetFile:
    try:
        source = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"cannot read completions {path}: {error}; generate the chunk again") from error
    missing = sorted(set(COLUMNS) - set(source.schema_arrow.names))
    if missing:
        raise DatasetError(f"{path} lacks the columns {', '.join(missing)}; expected a completions.parquet of a run")
    return source


def _digest(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise DatasetError(f"cannot read completions {path}: {error.strerror}; generate the chunk first") from error


def _batches(source: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    yield from source.iter_batches(batch_size=BATCH_ROWS, columns=list(COLUMNS))


def _reusable(path: Path, key: dict[str, str]) -> dict[str, Any] | None:
    """The record of a file that was made from the same bytes in the same way."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except (OSError, pa.ArrowException):
        return None
    if any(metadata.get(f"regen.{name}".encode(), b"").decode() != value for name, value in key.items()):
        return None
    record: dict[str, Any] = json.loads(metadata[b"regen.record"])
    return record


@dataclass(slots=True)
class _Sums:
    rows: int = 0
    rejected: int = 0
    supervised: int = 0
    exact: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    largest_difference: int = 0


class _Output:
    """The files of one chunk under temporary names; `finish` gives them their own."""

    def __init__(self, tokens: Path, pack_to: int | None) -> None:
        self._paths = {"tokens": tokens, "rejected": tokens.with_name("tokens_rejected.parquet")}
        self._packer = Packer(pack_to) if pack_to else None
        if self._packer:
            self._paths["packed"] = tokens.with_name("packed.parquet")
        self._sums = _Sums()
        self._stack = ExitStack()
        self._writers: dict[str, pq.ParquetWriter] = {}

    def __enter__(self) -> "_Output":
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
        if batch.num_rows:
            self._writers[name].write_batch(batch)

    def finish(self, index: int, details: dict[str, Any]) -> TokenRecord:
        """Close, make durable, and give the files their names."""
        sums = self._sums
        if self._packer:
            self._append("packed", self._packer.finish())
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
