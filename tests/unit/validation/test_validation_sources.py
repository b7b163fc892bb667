"""What is named as a source: save_to_disk folders, doubled columns, and one file by several names."""

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.cli import run
from tasks.errors import DatasetError
from validation_rows import chat


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder of two splits as `save_to_disk` writes it."""
    folder = tmp_path / "saved"
    rows = datasets.Dataset.from_list([chat("a"), chat("b")])
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(str(folder))
    return folder


def test_a_saved_folder_is_read_by_its_split(saved: Path, judge: Any) -> None:
    assert judge(saved).sums == (2, 2, 0, 0)
    assert judge(saved, split="test").sums == (1, 1, 0, 0)
    with pytest.raises(DatasetError, match=r"has the splits train, test, not 'dev'"):
        judge(saved, split="dev")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("dataset_dict.json", "{broken", "no JSON"),
        ("dataset_dict.json", "{}", "the fields none"),
        ("dataset_dict.json", "[]", "a list"),
        ("dataset_dict.json", '{"splits": "train"}', "splits train"),
        ("dataset_dict.json", "\ud800", "no JSON"),
        ("train/state.json", "{}", "the fields none"),
        ("train/state.json", '{"_data_files": [7]}', "_data_files"),
        ("train/state.json", '{"_data_files": [{"name": "x"}]}', "file names"),
        ("train/state.json", "{", "no JSON"),
    ],
)
def test_a_damaged_saved_folder_is_one_clear_error(
    name: str, text: str, says: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert run(["validate", str(saved)]) == 2
    out, screen = capsys.readouterr()
    line = json.loads(out.strip().splitlines()[-1])
    assert line["kind"] == "DatasetError" and str(saved / name) in line["error"] and says in line["error"]
    assert "expected a JSON object" in line["error"] and "Traceback" not in screen


IDS, TEXT = pa.array([[1, 2]]), pa.array([[{"role": "user", "content": "q"}]])


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("names", "columns", "doubled"),
    [
        (["input_ids", "input_ids", "loss_mask"], [IDS, IDS, IDS], "input_ids"),
        (["input_ids", "loss_mask", "loss_mask"], [IDS, IDS, IDS], "loss_mask"),
        (["id", "id", "messages"], [pa.array(["x"]), pa.array(["y"]), TEXT], "id"),
        (["messages", "messages"], [TEXT, TEXT], "messages"),
    ],
)
def test_doubled_columns_are_one_clear_error(
    kind: str, names: list[str], columns: list[pa.Array], doubled: str, tmp_path: Path, judge: Any
) -> None:
    path, table = tmp_path / f"set.{kind}", pa.Table.from_arrays(columns, names)
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DatasetError, match=rf"set\.{kind} has columns of the same name: {doubled} \(2 times\)"):
        judge(path)


def test_a_doubled_column_that_is_not_read_does_not_matter(tmp_path: Path, judge: Any) -> None:
    path, note = tmp_path / "set.parquet", pa.array(["n"])
    pq.write_table(pa.Table.from_arrays([TEXT, note, note], ["messages", "note", "note"]), path)
    assert judge(path).sums == (1, 1, 0, 0)


def test_a_file_named_twice_is_read_once_and_said(
    jsonl: Any, judge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl([chat("a"), chat("b"), b"{"], "base.jsonl")
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    monkeypatch.chdir(tmp_path)
    spellings = ("base.jsonl", "./base.jsonl", path, tmp_path / "x" / ".." / "base.jsonl", link, "b*.jsonl")
    (tmp_path / "x").mkdir()
    with caplog.at_level(logging.WARNING, "tasks.validation.sources"):
        assert judge("base.jsonl", "base.jsonl").sums == (3, 2, 1, 0)
        assert caplog.messages == ["base.jsonl was already named; it is read once"]
        caplog.clear()
        assert judge(*spellings).sums == (3, 2, 1, 0)
    assert len(caplog.messages) == 5
    assert caplog.messages[-2] == f"{link} was already named as base.jsonl; it is read once"
