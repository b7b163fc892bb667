"""From spilled units to the two files: partitions of the id space in order, duplicates out, sorted, one writer."""

from collections import Counter
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.validation.reasons import Reason
from tasks.validation.schema import PROMPTS, REJECTED
from tasks.validation.spill import SPILL

ROW_GROUP_BYTES = 64 << 20
"""A row group is closed at this many bytes of Arrow memory, or at 50,000 rows."""


FAN_IN = 256
"""Spilled files open at once: well below the usual limit of 1,024 open files."""

FEW_VALUES = ("source", "reason", "regenerate_reason", "sample_index", "tools", "messages.list.element.role")
"""Columns worth a dictionary; building one for prompts and ids costs as much as compressing them."""


@dataclass(slots=True)
class Merged:
    """Sums after the merge. Rows are counted by their sample 0; `prompts` counts every sample."""

    prompts: int = 0
    kept: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    regenerate: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Ids that must not be written: done already, or nearly the same as another prompt."""

    done: Container[str] = frozenset()
    near: dict[str, str] = field(default_factory=dict)


class Writer:
    """Parquet, a declared schema, row groups closed by bytes as well as rows."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        names = {field.name for field in schema}
        few = [name for name in FEW_VALUES if name.split(".")[0] in names]
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", compression_level=1, use_dictionary=few)
        self._held: list[pa.Table] = []
        self._bytes = self._rows = 0

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, table: pa.Table) -> None:
        """Append; flushes when the row group is full."""
        if not table.num_rows:
            return
        self._held.append(table)
        self._bytes += table.nbytes
        self._rows += table.num_rows
        if self._bytes >= ROW_GROUP_BYTES or self._rows >= 50_000:
            self._flush()

    def close(self) -> None:
        """Write what is left and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._held:
            self._writer.write_table(pa.concat_tables(self._held), row_group_size=50_000)
        self._held, self._bytes, self._rows = [], 0, 0


def consolidate(paths: list[str], partitions: int) -> list[str]:
    """At most FAN_IN files with the same rows: groups of them become one file each, partition by partition."""
    while len(paths) > FAN_IN:
        merged = []
        for start in range(0, len(paths), FAN_IN):
            group = paths[start : start + FAN_IN]
            merged.append(_joined(group, partitions) if len(group) > 1 else group[0])
        paths = merged
    return paths


def _joined(paths: list[str], partitions: int) -> str:
    place = f"{paths[0]}.joined"
    maps = [pa.memory_map(path) for path in paths]
    files = [pa.ipc.open_file(mapped) for mapped in maps]
    with pa.OSFile(place, "wb") as sink, pa.ipc.new_file(sink, SPILL) as writer:
        for partition in range(partitions):
            found = [file.get_batch(partition) for file in files]
            joined = pa.Table.from_batches(found, SPILL).combine_chunks().to_batches()
            writer.write_batch(joined[0] if joined else found[0])
    for path, mapped in zip(paths, maps, strict=True):
        mapped.close()
        Path(path).unlink()
    return place


def merge_kept(
    paths: list[str], labels: list[str], partitions: int, out: Writer, rejected: Writer, exclude: Exclusions
) -> Merged:
    """Write prompts in id order; send what is lost to `rejected`. One partition is read while another is written."""
    merged = Merged()
    sources = pa.array(labels, pa.string())
    files = [pa.ipc.open_file(pa.memory_map(path)) for path in consolidate(paths, partitions)]

    def load(partition: int) -> pa.Table:
        batches = [file.get_batch(partition) for file in files]
        table = pa.Table.from_batches([b for b in batches if len(b)], SPILL)
        order = [("prompt_id", "ascending"), ("source_index", "ascending"), ("row", "ascending")]
        return table.take(pc.sort_indices(table, sort_keys=order))

    with ThreadPoolExecutor(1) as ahead:
        upcoming = ahead.submit(load, 0)
        for partition in range(partitions):
            table = upcoming.result()
            if partition + 1 < partitions:
                upcoming = ahead.submit(load, partition + 1)
            _place(table, sources, out, rejected, exclude, merged)
    return merged


def _place(
    table: pa.Table, sources: pa.Array, out: Writer, rejected: Writer, exclude: Exclusions, merged: Merged
) -> None:
    if not table.num_rows:
        return
    ids = table.column("prompt_id").combine_chunks()
    repeated = np.zeros(len(ids), bool)
    repeated[1:] = pc.equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)
    lost = _lose(table, ids, sources, repeated, Reason.DUPLICATE, ids, rejected, merged)
    known = ids.to_pylist() if exclude.near or not isinstance(exclude.done, frozenset) or exclude.done else []
    if known:
        done = np.array([i in exclude.done for i in known], bool) & ~lost
        lost |= _lose(table, ids, sources, done, Reason.ALREADY_DONE, ids, rejected, merged)
        near = np.array([i in exclude.near for i in known], bool) & ~lost
        twins = pa.array([exclude.near.get(i) for i in known], pa.string())
        lost |= _lose(table, ids, sources, near, Reason.NEAR_DUPLICATE, twins, rejected, merged)
    kept = table.filter(pa.array(~lost)) if lost.any() else table
    merged.prompts += kept.num_rows
    firsts = kept.column("sample_index").to_numpy() == 0
    merged.kept += int(firsts.sum())
    reasons = kept.column("regenerate_reason").filter(pa.array(firsts)).drop_null()
    merged.regenerate.update({v["values"]: v["counts"] for v in reasons.value_counts().to_pylist()})
    out.write(_renamed(kept, sources))


def _renamed(table: pa.Table, sources: pa.Array) -> pa.Table:
    column = sources.take(table.column("source_index").combine_chunks())
    at = table.schema.get_field_index("source_index")
    return table.set_column(at, PROMPTS.field("source"), column).select(PROMPTS.names).cast(PROMPTS)


def _lose(
    table: pa.Table,
    ids: pa.Array,
    sources: pa.Array,
    where: np.ndarray,
    reason: Reason,
    twins: pa.Array,
    rejected: Writer,
    merged: Merged,
) -> np.ndarray:
    """Send rows at `where` to the rejects, once a row (sample 0 speaks for all)."""
    if where.any():
        firsts = where & (table.column("sample_index").to_numpy() == 0)
        at = pa.array(np.flatnonzero(firsts))
        n = len(at)
        merged.lost[reason.value] += n
        columns = {
            "source": sources.take(table.column("source_index").combine_chunks().take(at)),
            "row": table.column("row").combine_chunks().take(at),
            "id": table.column("row_id").combine_chunks().take(at),
            "reason": pa.array([reason.value] * n, pa.string()),
            "detail": pa.array([reason.explanation] * n, pa.string()),
            "duplicate_of": twins.take(at),
            "prompt_id": ids.take(at),
        }
        rejected.write(pa.Table.from_arrays([columns[name] for name in REJECTED.names], schema=REJECTED))
    return where
