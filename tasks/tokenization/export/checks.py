"""What an exporter asks of the files that it reads, before it writes anything a trainer would learn from."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.errors import DatasetError

ARRAYS = ("input_ids", "loss_mask")


def check_columns(path: Path, wanted: Sequence[str], trainer: str) -> None:
    """Raise DatasetError when the Parquet file `path` does not hold each of `wanted` once, arrays as integer lists."""
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"cannot read {path}: {error}; fetch it or tokenize the chunk again") from error
    counts = Counter(schema.names)
    missing = [name for name in wanted if name not in counts]
    if missing:
        raise DatasetError(
            f"{path} has no {_listed(missing)} (columns: {', '.join(schema.names[:12])}); "
            f"--trainer {trainer} needs {', '.join(wanted)}: export the run or the published data set that the file is "
            "of, tokenize again, or choose a trainer that needs the arrays alone (specforge, speculators-prepared)"
        )
    doubled = [name for name in wanted if counts[name] > 1]
    if doubled:
        raise DatasetError(
            f"{path} has {_listed(doubled)} more than once, expected once; rename or drop one, and write it again"
        )
    for name in ARRAYS:
        if name in wanted and not _is_integers(schema.field(name).type):
            raise DatasetError(
                f"{path}: column {name} is {schema.field(name).type}, expected a list of integers; tokenize again"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"column {name}" for name in names)


def _is_integers(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and pa.types.is_integer(kind.value_type))


def check_rows(batch: pa.RecordBatch, path: Path, first_row: int) -> None:
    """Raise DatasetError naming the first row of `batch` whose ids and mask no tokenization wrote.

    A published file never holds such a row: it is damage, or somebody else's file. `first_row` is the batch's first.
    """
    ids, mask = (batch.column(name) for name in ARRAYS)
    for name, lists in zip(ARRAYS, (ids, mask), strict=True):
        if lists.null_count:
            _refuse(path, first_row + _first(lists.is_null()), f"{name} is null")
        values = lists.flatten()
        if values.null_count:
            _refuse(path, first_row + _row_of(lists, _first(values.is_null())), f"{name} holds a null")
    sizes, mask_sizes = (lists.value_lengths().to_numpy(zero_copy_only=False) for lists in (ids, mask))
    unequal = np.flatnonzero(sizes != mask_sizes)
    if unequal.size:
        at = int(unequal[0])
        _refuse(path, first_row + at, f"{sizes[at]} input_ids and {mask_sizes[at]} entries of loss_mask")
    bits = mask.flatten().to_numpy()
    if bits.size and not 0 <= bits.min() <= bits.max() <= 1:
        place = int(np.flatnonzero((bits < 0) | (bits > 1))[0])
        _refuse(path, first_row + _row_of(mask, place), f"{bits[place]} in loss_mask")


def _refuse(path: Path, row: int, found: str) -> None:
    raise DatasetError(
        f"{path}: row {row:,} (counted from 0) has {found}; expected as many loss_mask entries, each 0 or 1, as "
        "input_ids, and neither null: the file is damaged or not a token file; `regen verify` the data set, or "
        "tokenize again"
    )


def _first(truths: Any) -> int:
    return int(pc.index(truths, True).as_py())


def _row_of(lists: Any, place: int) -> int:
    """The row that holds entry `place` of the flattened `lists`."""
    ends = np.cumsum(pc.fill_null(lists.value_lengths(), 0).to_numpy(zero_copy_only=False))
    return int(np.searchsorted(ends, place, side="right"))
