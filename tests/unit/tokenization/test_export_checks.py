"""Exports refuse files that no tokenization wrote: missing or doubled columns, damaged rows."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.cli import run
from tasks.errors import DatasetError
from tasks.tokenization.export import source as source_module
from tasks.tokenization.export.run import export

IDS = [[1, 2, 3], [4, 5], [], [6, 7, 8]]
MASK = [[0, 0, 1], [0, 1], [], [0, 1, 1]]


def tokens(path: Path, ids: list = IDS, mask: list = MASK, kind: type = pa.list_, **more: list) -> Path:
    """A token file with the three columns that make one."""
    columns = {
        "prompt_id": pa.array([f"p{n}" for n in range(len(ids))]),
        "input_ids": pa.array(ids, kind(pa.int32())),
        "loss_mask": pa.array(mask, kind(pa.int8())),
        **{name: pa.array(values) for name, values in more.items()},
    }
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def refused(path: Path, trainer: str, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one error that the command line ends with; nothing is written."""
    assert run(["export", str(path), "--trainer", trainer, "--out", str(out)]) == 2
    said = capsys.readouterr()
    line = json.loads(said.out.strip().splitlines()[-1])
    assert line["kind"] == "DatasetError" and str(path) in line["error"] and "Traceback" not in said.err
    assert not out.exists() or not list(out.iterdir())
    return str(line["error"])


@pytest.mark.parametrize("trainer", ["specforge", "speculators-prepared"])
def test_arrays_alone_are_enough_where_the_form_has_nothing_else(trainer: str, tmp_path: Path):
    assert export(tokens(tmp_path / "tokens.parquet"), trainer, tmp_path / "out").rows == 4


@pytest.mark.parametrize("trainer", ["speculators", "specforge-raw", "automodel", "deepspec"])
def test_a_column_that_the_form_needs_is_named_with_its_file(trainer: str, tmp_path: Path, capsys):
    error = refused(tokens(tmp_path / "tokens.parquet"), trainer, tmp_path / "out", capsys)
    assert "has no column turn" in error and f"--trainer {trainer} needs" in error and "export the run" in error
    assert ("column finish_reason" in error) is (trainer == "speculators")


def test_completions_lack_a_column(tmp_path: Path, capsys):
    path = tokens(tmp_path / "set" / "tokens.parquet", turn=[0] * 4)
    beside = path.with_name("completions.parquet")
    pq.write_table(pa.table({"prompt_id": ["p0"], "turns": pa.array([[]], pa.list_(pa.string()))}), beside)
    assert run(["export", str(path), "--trainer", "automodel", "--out", str(tmp_path / "out")]) == 2
    error = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["error"]
    assert f"{beside} has no column messages, column tools" in error


def test_a_doubled_column_and_other_types_are_refused(tmp_path: Path, capsys):
    path = tmp_path / "tokens.parquet"
    arrays = [pa.array(["p"]), pa.array([[1]]), pa.array([[1]]), pa.array([[1]])]
    pq.write_table(pa.Table.from_arrays(arrays, ["prompt_id", "input_ids", "input_ids", "loss_mask"]), path)
    assert "column input_ids more than once" in refused(path, "specforge", tmp_path / "out", capsys)
    pq.write_table(pa.table({"prompt_id": ["p"], "input_ids": [[1]], "loss_mask": [[True]]}), path)
    assert "column loss_mask is list<" in refused(path, "specforge", tmp_path / "out", capsys)


DAMAGE = [
    ([[1, 2, 3], [4, 5], [], [6, 7, 8]], [[0, 0, 1], [0, 1], [], [0, 1]], "row 3", "3 input_ids and 2 entries"),
    (IDS, [[0, 0, 1], [0, 5], [], [0, 1, 1]], "row 1", "5 in loss_mask"),
    (IDS, [[0, 0, 1], [0, 1], [], [-1, 1, 1]], "row 3", "-1 in loss_mask"),
    ([[1, 2, 3], None, [], [6, 7, 8]], MASK, "row 1", "input_ids is null"),
    (IDS, [[0, 0, 1], [0, 1], None, [0, 1, 1]], "row 2", "loss_mask is null"),
    ([[1, 2, 3], [4, 5], [], [6, None, 8]], MASK, "row 3", "input_ids holds a null"),
    (IDS, [[0, 0, 1], [None, 1], [], [0, 1, 1]], "row 1", "loss_mask holds a null"),
]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
@pytest.mark.parametrize(("ids", "mask", "row", "found"), DAMAGE)
def test_a_damaged_row_fails_the_export_before_it_writes(
    kind, ids: list, mask: list, row: str, found: str, tmp_path: Path, capsys
):
    path = tokens(tmp_path / "tokens.parquet", ids, mask, kind)
    for trainer in ("specforge", "speculators-prepared"):
        error = refused(path, trainer, tmp_path / "out", capsys)
        assert f"{row} (counted from 0) has {found}" in error and "regen verify" in error


def test_conversations_are_not_written_from_damaged_tokens_either(tmp_path: Path, capsys):
    path = tokens(tmp_path / "tokens.parquet", mask=[[0, 0, 1], [0, 5], [], [0, 1, 1]], turn=[0] * 4)
    assert "5 in loss_mask" in refused(path, "automodel", tmp_path / "out", capsys)


@pytest.mark.parametrize("batch_rows", [1, 3, 512])
def test_rows_are_counted_over_batches(batch_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source_module, "BATCH_ROWS", batch_rows)
    path = tokens(tmp_path / "tokens.parquet", IDS * 3, MASK * 2 + [*MASK[:3], [0, 2, 1]])
    with pytest.raises(DatasetError, match="row 11 "):
        export(path, "specforge", tmp_path / "out")
