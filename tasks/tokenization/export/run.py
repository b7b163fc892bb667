"""Export: find the files, write the trainer's form, count what its own filter will drop, leave a record."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import SpecError
from tasks.runs import write_atomic
from tasks.tokenization.export.checks import ARRAYS, check_columns
from tasks.tokenization.export.filters import RowFacts, told
from tasks.tokenization.export.formats import TRAINERS, Trainer
from tasks.tokenization.export.shards import prepare_folder
from tasks.tokenization.export.source import Part, Source, refuse_repeats
from tasks.tokenization.schema import MASK_CONVENTION

RECORD = "EXPORT"
"""Name of the record in the folder. Not .json: loaders take every .json of a folder for data."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote and what the trainer will make of it."""

    trainer: str
    out: str
    rows: int
    files: int
    dropped_by_trainer: int
    reader: str
    filter: str
    note: str
    seq_length: int | None
    mask_convention: str = MASK_CONVENTION

    @property
    def dropped_text(self) -> str:
        """`speculators 0.9.0 will drop 3 of them (it drops rows with …)`."""
        count = f"{self.dropped_by_trainer:,}" if self.dropped_by_trainer else "none"
        return f"{self.reader} will drop {count} of them (it drops {self.filter})"


def export(
    path: Path,
    trainer: str,
    out: Path,
    *,
    shard_rows: int | None = None,
    seq_length: int | None = None,
    block: int = 16,
) -> Exported:
    """Write `path`'s accepted rows for `trainer` into the empty folder `out`.

    `seq_length` is the window the trainer is set to (its published default where left out), `block` its draft block.
    Raises DatasetError, before anything is written, when there is nothing to export, a file lacks a column that the
    trainer's form needs, or a row is damaged or there twice; SpecError for an unknown trainer or a folder in use.
    """
    form = TRAINERS.get(trainer)
    if form is None:
        raise SpecError(f"unknown trainer {trainer!r}; known are {', '.join(TRAINERS)}")
    source = Source(path)
    _check_files(source.parts, form, trainer)
    refuse_repeats(source.parts)
    prepare_folder(out)
    length = seq_length or form.length
    dropped = count_dropped(source, form, length, block)  # first, for it reads every row and refuses a damaged one
    rows, files = form.write(source, out, shard_rows or form.shard_rows)
    reader, rule = told(form.dropped, trainer, length, block)
    result = Exported(
        trainer=trainer,
        out=str(out),
        rows=rows,
        files=len(files),
        dropped_by_trainer=dropped,
        reader=reader,
        filter=rule,
        note=form.note,
        seq_length=length,
    )
    write_atomic(out / RECORD, json.dumps(as_dict(result), indent=1).encode() + b"\n")
    return result


def _check_files(parts: Sequence[Part], form: Trainer, trainer: str) -> None:
    for part in parts:
        check_columns(part.tokens, (*form.tokens, *ARRAYS), trainer)
        if form.completions and part.completions is not None:
            check_columns(part.completions, form.completions, trainer)


def count_dropped(source: Source, form: Trainer, length: int | None, block: int) -> int:
    """Rows of this export that the trainer's own filter will drop.

    For trainers that get whole conversations a conversation is dropped by what its last accepted turn holds.
    """
    last: defaultdict[str, tuple[int, bool]] = defaultdict(lambda: (-1, False))
    dropped = 0
    for batch in source.batches():
        gone = form.dropped(RowFacts.of(batch), length, block)
        if not form.per_prompt:
            dropped += int(gone.sum())
            continue
        names = zip(batch.column("prompt_id").to_pylist(), batch.column("turn").to_pylist(), strict=True)
        for (prompt_id, turn), drop in zip(names, gone.tolist(), strict=True):
            last[prompt_id] = max(last[prompt_id], (turn, drop))
    return dropped + sum(drop for _, drop in last.values())


def as_dict(result: Exported) -> dict[str, Any]:
    """JSON-able form."""
    return {name: getattr(result, name) for name in Exported.__dataclass_fields__}
