"""Export: find the files, write the trainer's form, count what its own filter will drop, leave a record."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import SpecError
from tasks.runs import write_atomic
from tasks.tokenization.export.filters import RowFacts, told
from tasks.tokenization.export.formats import TRAINERS, Trainer
from tasks.tokenization.export.shards import prepare_folder
from tasks.tokenization.export.source import Source, refuse_repeats
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
    Raises DatasetError when there is nothing to export or a row is there twice, SpecError for an unknown trainer or a
    folder in use.
    """
    form = TRAINERS.get(trainer)
    if form is None:
        raise SpecError(f"unknown trainer {trainer!r}; known are {', '.join(TRAINERS)}")
    source = Source(path)
    refuse_repeats(source.parts)
    prepare_folder(out)
    rows, files = form.write(source, out, shard_rows or form.shard_rows)
    length = seq_length or form.length
    reader, rule = told(form.dropped, trainer, length, block)
    result = Exported(
        trainer=trainer,
        out=str(out),
        rows=rows,
        files=len(files),
        dropped_by_trainer=count_dropped(source, form, length, block),
        reader=reader,
        filter=rule,
        note=form.note,
        seq_length=length,
    )
    write_atomic(out / RECORD, json.dumps(as_dict(result), indent=1).encode() + b"\n")
    return result


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
