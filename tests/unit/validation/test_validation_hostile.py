"""Files that are cut, damaged or oddly written: no row vanishes without a word, and no input ends the program."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tasks.errors import DatasetError
from tasks.validation.plan import units
from tasks.validation.reasons import Reason
from tasks.validation.run import validate
from tasks.validation.scan import scan_units
from tasks.validation.settings import SourceSettings
from tasks.validation.sources import resolve
from tasks.validation.tokenized import CODE, TokenRules

ROWS = [{"prompt": f"What is the number {i}?"} for i in range(20)]


def judged(folder: Path, name: str, data: bytes, **settings: Any) -> Any:
    path = folder / name
    path.write_bytes(data)
    return validate(SourceSettings(paths=(str(path),), **settings), None, folder / "out")


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize("cut", [4, 200])
def test_a_cut_zstd_file_is_an_error_and_not_a_shorter_set(tmp_path: Path, cut: int) -> None:
    packed = zstandard.compress(lines([{"prompt": f"{i} {hash(i * 7919)}"} for i in range(3000)]))
    assert judged(tmp_path, "whole.jsonl.zst", packed + zstandard.compress(lines(ROWS))).kept == 3020
    with pytest.raises(DatasetError, match="frame is cut"):
        judged(tmp_path, "cut.jsonl.zst", packed[:-cut])


def test_junk_behind_compressed_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="damaged"):
        judged(tmp_path, "a.jsonl.zst", zstandard.compress(lines(ROWS) * 9000) + b"junk behind the end")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
@pytest.mark.parametrize("first", [b"[torn garbage\n", b'{"messages": oops}\n', b"[1,2\n"])
def test_a_broken_first_line_is_one_reject(tmp_path: Path, name: str, first: bytes) -> None:
    found = judged(tmp_path, name, first + lines(ROWS))
    assert (found.rows, found.kept, found.rejected) == (21, 20, 1)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("odd", ["", "NaN", "tool 1234567890123456789"])
def test_an_object_that_holds_the_rows_is_read_row_by_row(tmp_path: Path, indent: int | None, odd: str) -> None:
    rows = [*ROWS, {"prompt": "odd", "note": float("nan") if odd == "NaN" else odd}]
    found = judged(tmp_path, "a.json", json.dumps({"info": "data: [", "data": rows}, indent=indent).encode())
    assert (found.rows, found.kept) == (21, 20 if odd == "NaN" else 21)


def test_an_array_with_a_row_a_line_stays_a_document(tmp_path: Path) -> None:
    text = "[" + ",\n".join(json.dumps(row) for row in ROWS) + "]\n"
    assert judged(tmp_path, "a.jsonl", text.encode()).kept == 20


def test_a_lone_surrogate_beside_a_big_integer_is_a_reject(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": '{"a":"\\ud800","n":12345678901234567890}'}}
    bad = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    found = judged(tmp_path, "a.jsonl", lines([*ROWS, bad]), duplicates="prompt")
    assert (found.rows, found.kept, found.reasons) == (21, 20, {"BAD_TOOL_CALL": 1})


def test_a_nul_byte_in_a_long_first_line_is_no_binary_file(tmp_path: Path) -> None:
    assert judged(tmp_path, "a.jsonl", b'{"prompt": "' + b"x" * 70_000 + b'\0"}\n' + lines(ROWS)).kept == 20


def test_nested_dictionaries_in_an_arrow_stream_are_read(tmp_path: Path) -> None:
    role = pa.dictionary(pa.int32(), pa.string())
    kind = pa.list_(pa.struct([("role", role), ("content", pa.string())]))
    table = pa.table({"messages": pa.array([[{"role": "user", "content": str(i)}] for i in range(6)], kind)})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table, max_chunksize=2)
    assert validate(SourceSettings(paths=(str(tmp_path / "a.arrow"),)), None, tmp_path / "out").kept == 6


def test_offsets_that_point_outside_are_damage_and_end_nothing_but_the_command(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink:
        batch = pa.RecordBatch.from_pydict({"prompt": ["abc", "d", "ef"]})
        with pa.ipc.new_stream(sink, batch.schema) as out:
            out.write_batch(batch)
    offsets, wrong = (np.array(values, "<i4").tobytes() for values in ([0, 3, 4, 6], [0, 70_000, 4, 6]))
    assert path.read_bytes().count(offsets) == 1
    path.write_bytes(path.read_bytes().replace(offsets, wrong))
    with pytest.raises(DatasetError, match="damaged"):
        validate(SourceSettings(paths=(str(tmp_path / "a.arrow"),)), None, tmp_path / "out")


def test_rows_that_the_index_promises_and_reading_does_not_bring_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"prompt": [row["prompt"] for row in ROWS]}), tmp_path / "a.parquet")
    monkeypatch.setattr("tasks.validation.plan.group_rows", lambda source: [22])
    with pytest.raises(DatasetError, match="2 short"):
        validate(SourceSettings(paths=(str(tmp_path / "a.parquet"),), workers=1), None, tmp_path / "out")


def codes(folder: Path, ids: list[Any], mask: list[Any], kind: pa.DataType, **more: Any) -> Any:
    table = pa.table(
        {"input_ids": pa.array(ids, pa.list_(kind)), "loss_mask": pa.array(mask, pa.list_(pa.int8())), **more}
    )
    pq.write_table(table, folder / "t.parquet")
    settings = SourceSettings(paths=(str(folder / "t.parquet"),))
    return list(scan_units(units(resolve(settings, folder / "u"), settings), TokenRules(1, 248_320)))


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32(), pa.int64()], ids=str)
def test_negative_ids_are_out_of_range_whatever_their_width(tmp_path: Path, kind: pa.DataType) -> None:
    (part,) = codes(tmp_path, [[-1, 5, 6], [1, 2, 127]], [[1, 1, 1]] * 2, kind)
    assert part.codes.tolist() == [CODE[Reason.ID_OUT_OF_RANGE], 0]


def test_equal_ids_under_another_mask_are_no_duplicates(tmp_path: Path) -> None:
    ids = [list(range(30))] * 3
    masks = [[1] * 10 + [0] * 20, [0] * 20 + [1] * 10, [1] * 10 + [0] * 20]
    (part,) = codes(tmp_path, ids, masks, pa.int32())
    assert part.hashes[0] == part.hashes[2] != part.hashes[1]


def test_an_id_column_of_an_odd_type_is_ignored(tmp_path: Path) -> None:
    (part,) = codes(tmp_path, [[1, 2]], [[1, 1]], pa.int32(), id=pa.array([{"a": 1}]))
    assert part.ids is None and part.codes.tolist() == [0]


def test_two_configs_of_one_hub_set_are_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(name: str, config: str | None, settings: SourceSettings, local: Path) -> None:
        local.write_bytes(lines([{"prompt": f"{config} {i}"} for i in range(3)]))

    monkeypatch.setattr("tasks.validation.remote._stream", stream)
    paths = ("hf://org/set:first", "hf://org/set:second", "hf://org_set")
    assert validate(SourceSettings(paths=paths), None, tmp_path / "out").kept == 9
