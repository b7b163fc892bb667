"""What a worker leaves on disk for the merge: rows sorted by id, cut into partitions of the id space."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from pathlib import Path

import pyarrow as pa

from tasks.validation.policy import KeptRow
from tasks.validation.reasons import RowError
from tasks.validation.schema import MESSAGE, PROMPTS, REJECTED

SPILL = pa.schema(
    [
        PROMPTS.field("prompt_id"),
        PROMPTS.field("messages"),
        PROMPTS.field("tools"),
        PROMPTS.field("sample_index"),
        pa.field("source_index", pa.int32(), nullable=False),
        PROMPTS.field("row"),
        PROMPTS.field("regenerate_reason"),
        PROMPTS.field("old_output_tokens"),
        pa.field("row_id", pa.string()),
    ]
)
_TURN_TYPES = [MESSAGE.field(i).type for i in range(MESSAGE.num_fields)]


Entry = tuple[str, KeptRow, int, int, str | None]
"""prompt id, the row, sample index, row number, the id that the row brought along."""


@dataclass(slots=True)
class Collected:
    """The rows of one unit while it is read. Lists, because they become Arrow columns whole."""

    source_index: int
    source: str
    kept: list[Entry] = field(default_factory=list)
    rejects: list[tuple[int, str | None, str, str]] = field(default_factory=list)  # row number, id, reason, detail
    rows: int = 0

    def keep(self, number: int, row_id: str | None, kept: KeptRow) -> None:
        """A usable row: one entry a sample."""
        for sample, prompt_id in enumerate(kept.ids):
            self.kept.append((prompt_id, kept, sample, number, row_id))

    def reject(self, number: int, row_id: str | None, error: RowError) -> None:
        """A rejected row. The detail is cut and made printable: it may quote hostile bytes."""
        detail = error.detail[:300].encode("utf-8", "replace").decode()
        self.rejects.append((number, row_id, error.reason.value, detail))


def bounds(partitions: int) -> list[str]:
    """The smallest two hex characters of every partition but the first."""
    return [f"{-(-256 * p // partitions):02x}" for p in range(1, partitions)]


def write_kept(path: Path, collected: Collected, partitions: int) -> None:
    """One record batch a partition, in order."""
    # Rows were collected in order, and sorting is stable: equal ids stay in row order.
    ordered = sorted(collected.kept, key=itemgetter(0))
    batch = _batch(ordered, collected.source_index)
    ids = [entry[0] for entry in ordered]
    cuts = [0, *(bisect_left(ids, bound) for bound in bounds(partitions)), len(ids)]
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SPILL) as writer:
        for start, end in pairwise(cuts):
            writer.write_batch(batch.slice(start, end - start))


def _batch(entries: Sequence[Entry], source_index: int) -> pa.RecordBatch:
    rows = [entry[1] for entry in entries]
    columns = {
        "prompt_id": [entry[0] for entry in entries],
        "tools": [row.tools for row in rows],
        "sample_index": [entry[2] for entry in entries],
        "source_index": [source_index] * len(entries),
        "row": [entry[3] for entry in entries],
        "regenerate_reason": [row.regenerate_reason for row in rows],
        "old_output_tokens": [row.old_output_tokens for row in rows],
        "row_id": [entry[4] for entry in entries],
    }
    arrays = {name: pa.array(values, SPILL.field(name).type) for name, values in columns.items()}
    arrays["messages"] = messages_array([row.turns for row in rows])
    return pa.RecordBatch.from_arrays([arrays[name] for name in SPILL.names], schema=SPILL)


def messages_array(conversations: Sequence[Sequence[tuple[str | None, ...]]]) -> pa.ListArray:
    """list<struct of the six Message fields>, built a column at a time."""
    offsets = pa.array([0, *accumulate(map(len, conversations))], pa.int32())
    fields = list(zip(*chain.from_iterable(conversations), strict=True)) or [()] * len(_TURN_TYPES)
    arrays = [pa.array(values, kind) for values, kind in zip(fields, _TURN_TYPES, strict=True)]
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(arrays, fields=list(MESSAGE)))


def rejects_table(source: str, rejects: Sequence[tuple[int, str | None, str, str]]) -> pa.Table:
    """Rejects of one source in the schema of rejected.parquet."""
    numbers, ids, reasons, details = zip(*rejects, strict=True) if rejects else ((), (), (), ())
    nulls = pa.nulls(len(numbers), pa.string())
    sources = pa.array([source] * len(numbers), pa.string())
    columns = [sources, pa.array(numbers, pa.int64()), pa.array(ids, pa.string())]
    columns += [pa.array(reasons, pa.string()), pa.array(details, pa.string()), nulls, nulls]
    return pa.Table.from_arrays(columns, schema=REJECTED)


def write_table(path: Path, table: pa.Table) -> None:
    """An Arrow file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def read_rejects(path: str) -> pa.Table:
    """A file of `write_table`."""
    with pa.memory_map(path) as source:
        return pa.ipc.open_file(source).read_all()
