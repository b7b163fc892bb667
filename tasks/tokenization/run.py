"""completions.parquet in, tokens.parquet and tokens_rejected.parquet out."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import DatasetError
from tasks.records import TokenRecord
from tasks.settings import SamplingSettings, TargetSettings
from tasks.target.load import load_target
from tasks.target.text import TargetText
from tasks.tokenization.fingerprint import digest, file_digest, fingerprint
from tasks.tokenization.output import Output
from tasks.tokenization.schema import MASK_CONVENTION
from tasks.tokenization.settings import TokenizationSettings
from tasks.tokenization.workers import Job, build_all, worker_count

BATCH_ROWS = 64
"""Conversations a batch: small, so that processes end together."""
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
    with Output(out_path, settings.pack_to) as output:
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
