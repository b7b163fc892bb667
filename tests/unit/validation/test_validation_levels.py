"""Lists read by their levels are what Arrow reads, for every way of writing them; other layouts are left to Arrow."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.validation.columns import batches, group_rows, token_batches
from tasks.validation.levels import OtherLayoutError, row_starts
from tasks.validation.lists import list_batches
from tasks.validation.units import Source, Unit

LISTS = ["input_ids", "loss_mask"]
LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000), st.just(1)), min_size=1, max_size=60)
IDS = {"open": pa.large_list(pa.int32()), "closed": pa.list_(pa.field("item", pa.int64(), nullable=False))}
WRITERS: list[dict[str, Any]] = [
    {"compression": "snappy"},
    {"compression": "zstd", "data_page_version": "2.0"},
    {"compression": "none", "use_dictionary": False, "data_page_size": 300},
    {"compression": "lz4", "data_page_version": "2.0", "data_page_size": 300},
    {"compression": "gzip", "use_dictionary": False, "column_encoding": "DELTA_BINARY_PACKED"},
    {"compression": "snappy", "dictionary_pagesize_limit": 200, "data_page_size": 500, "write_page_checksum": True},
]


def table(lengths: list[int], kind: pa.DataType, mask: pa.DataType) -> pa.Table:
    rng = np.random.default_rng(sum(lengths))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ids = pa.array(rng.zipf(1.3, offsets[-1]) % 5000, kind.value_type)
    marks = pa.array((rng.random(offsets[-1]) < 0.1).astype(np.int8)).cast(mask)
    large = pa.types.is_large_list(kind)
    arrays = (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, ids, type=kind)
    names = pa.array([f"row-{i}" for i in range(len(lengths))])
    return pa.table({"id": names, "input_ids": arrays, "loss_mask": pa.LargeListArray.from_arrays(offsets, marks)})


def unit_of(path: Path, rows: int) -> Unit:
    groups = tuple(range(pq.ParquetFile(path).num_row_groups))
    return Unit(0, Source(0, str(path), str(path), "parquet", tokenized=True), 0, rows, 1, groups=groups)


def read(found: Any) -> list[dict[str, Any]]:
    return [row for batch in found for row in batch.to_pylist()]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize("mask", [pa.int8(), pa.bool_(), pa.uint8(), pa.int64()], ids=str)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=LENGTHS, group_rows=st.integers(1, 60))
def test_lists_are_what_arrow_reads(
    tmp_path: Path, writer: dict[str, Any], kind: str, mask: pa.DataType, lengths: list[int], group_rows: int
) -> None:
    if "column_encoding" in writer:
        encoding = {"input_ids.list.element": writer["column_encoding"]}
        writer = writer | {"column_encoding": encoding}
    expected = table(lengths, IDS[kind], mask)
    pq.write_table(expected, tmp_path / "a.parquet", row_group_size=group_rows, **writer)
    unit = unit_of(tmp_path / "a.parquet", len(lengths))
    found = list(list_batches(unit.source.path, unit.groups, LISTS, ["id"]))
    assert read(found) == expected.select([*LISTS, "id"]).to_pylist()
    assert found[0].schema.field("input_ids").type.value_type == IDS[kind].value_type
    assert found[0].schema.field("loss_mask").type.value_type == mask


def test_files_of_polars_are_read_alike(tmp_path: Path) -> None:
    expected = table([5, 1, 700, 64, 8, 8, 1], IDS["open"], pa.int8())
    pl.DataFrame(pl.from_arrow(expected)).write_parquet(tmp_path / "a.parquet", row_group_size=3)
    unit = unit_of(tmp_path / "a.parquet", 7)
    assert read(list_batches(unit.source.path, unit.groups, LISTS, [])) == expected.select(LISTS).to_pylist()


@pytest.mark.parametrize("odd", [[[1, 2], None, [3]], [[1], [], [2, 3]], [[1, None], [2]]])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_nulls_and_empty_rows_are_left_to_arrow(tmp_path: Path, odd: list[Any], version: str) -> None:
    mask = [None if row is None else [1] * len(row) for row in odd]
    arrays = [pa.array(odd, pa.large_list(pa.int32())), pa.array(mask, pa.large_list(pa.int8()))]
    expected = pa.Table.from_arrays(arrays, LISTS)
    pq.write_table(expected, tmp_path / "a.parquet", data_page_version=version)
    unit = unit_of(tmp_path / "a.parquet", len(odd))
    with pytest.raises(OtherLayoutError, match="null or empty"):
        list(list_batches(unit.source.path, unit.groups, LISTS, []))
    assert read(token_batches(unit, LISTS, [])) == read(batches(unit, LISTS)) == expected.to_pylist()


def test_lengths_of_ids_and_mask_may_differ(tmp_path: Path) -> None:
    expected = pa.table({"input_ids": [[1, 2, 3], [4]], "loss_mask": [[1, 1], [1, 0, 0]]})
    pq.write_table(expected, tmp_path / "a.parquet")
    unit = unit_of(tmp_path / "a.parquet", 2)
    assert read(list_batches(unit.source.path, unit.groups, LISTS, [])) == expected.to_pylist()


def test_large_row_groups_are_streamed_by_arrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = table([30, 40], IDS["open"], pa.int8())
    pq.write_table(expected, tmp_path / "a.parquet")
    unit = unit_of(tmp_path / "a.parquet", 2)
    monkeypatch.setattr("tasks.validation.lists.MOST_VALUES", 69)
    with pytest.raises(OtherLayoutError, match="too large"):
        list(list_batches(unit.source.path, unit.groups, LISTS, []))
    assert read(token_batches(unit, LISTS, ["id"])) == expected.select([*LISTS, "id"]).to_pylist()


def test_ordinary_rows_are_found_without_a_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = table([40, 16, 900, 70_000, 33] * 40, IDS["open"], pa.int8())
    pq.write_table(expected, tmp_path / "a.parquet")
    monkeypatch.setattr("tasks.validation.levels._walked_runs", None)
    assert read(list_batches(str(tmp_path / "a.parquet"), [0], LISTS, [])) == expected.select(LISTS).to_pylist()


def test_batches_are_cut_at_a_number_of_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table([10] * 30, IDS["open"], pa.int8()), tmp_path / "a.parquet")
    monkeypatch.setattr("tasks.validation.lists.BATCH_VALUES", 100)
    found = list(list_batches(str(tmp_path / "a.parquet"), [0], LISTS, []))
    assert [len(batch) for batch in found] == [8, 8, 8, 6]


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("names", [pa.string(), pa.dictionary(pa.int32(), pa.string())], ids=["plain", "dictionary"])
def test_units_of_arrow_are_read_in_any_order(tmp_path: Path, kind: str, names: pa.DataType) -> None:
    expected = table(list(range(1, 21)), IDS["open"], pa.int8())
    expected = expected.set_column(0, "id", expected.column("id").cast(names).combine_chunks())
    path = str(tmp_path / "a.arrow")
    writer = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with pa.OSFile(path, "wb") as sink, writer(sink, expected.schema) as out:
        for batch in expected.to_batches(max_chunksize=3):
            out.write_batch(batch)
    source = Source(0, path, path, "arrow", tokenized=True)
    assert group_rows(source) == [3] * 6 + [2]
    for groups in ((5, 6), (0,), (2, 3, 4)):
        first, last = groups[0] * 3, min(groups[-1] * 3 + 3, 20)
        found = read(batches(Unit(0, source, first, last - first, 1, groups=groups), ["id", *LISTS]))
        assert found == expected.slice(first, last - first).to_pylist()


@given(st.binary(max_size=40), st.integers(1, 60))
def test_any_bytes_as_levels_give_starts_in_range_or_an_error(levels: bytes, count: int) -> None:
    try:
        starts = row_starts(np.frombuffer(levels, np.uint8), count)
    except (OtherLayoutError, IndexError):
        return
    assert (np.diff(starts) > 0).all() and (not len(starts) or 0 <= starts[0] <= starts[-1] < count)


def test_damage_is_named_by_arrow_or_read_the_same(tmp_path: Path) -> None:
    from tasks.errors import DatasetError

    path = tmp_path / "a.parquet"
    pq.write_table(table([300, 40, 7], IDS["open"], pa.int8()), path, compression="zstd")
    whole = path.read_bytes()
    for at in range(4, len(whole) // 2, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        unit = Unit(0, Source(0, str(path), str(path), "parquet", tokenized=True), 0, 3, 1, groups=(0,))
        outcomes = []
        for reader in (lambda unit: token_batches(unit, LISTS, []), lambda unit: batches(unit, LISTS)):
            try:
                outcomes.append(read(reader(unit)))
            except DatasetError:
                outcomes.append([])
        assert outcomes[0] == outcomes[1] or outcomes[0]
