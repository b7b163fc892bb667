"""A run's folder: adopted after a crash, refused under another spec, written whole or not at all."""

from pathlib import Path

import pytest

from tasks.errors import SpecError, StorageError
from tasks.runs import begin_run, finish_run, open_run, read_json, write_atomic, write_json


def begin(folder: Path, **identity: object) -> str:
    paths, _ = open_run(folder, identity, digest=str(sorted(identity.items())))
    begin_run(paths, {"identity": identity, "identity_digest": str(sorted(identity.items()))})
    return paths.run_id


def test_an_unfinished_run_is_adopted_and_a_finished_one_is_not(tmp_path: Path) -> None:
    first = begin(tmp_path, temperature=1.0)
    paths, adopted = open_run(tmp_path, {"temperature": 1.0}, "[('temperature', 1.0)]")
    assert adopted and paths.run_id == first
    finish_run(paths)
    again, adopted = open_run(tmp_path, {"temperature": 1.0}, "[('temperature', 1.0)]")
    assert not adopted and again.run_id != first


def test_another_spec_is_refused_with_the_field_that_differs(tmp_path: Path) -> None:
    begin(tmp_path, temperature=1.0, model="m")
    with pytest.raises(SpecError, match=r"temperature: 1.0 there, 0.6 now"):
        open_run(tmp_path, {"temperature": 0.6, "model": "m"}, "other")


def test_facts_of_a_run_are_merged(tmp_path: Path) -> None:
    paths, _ = open_run(tmp_path, {}, "d")
    paths.note(a=1)
    paths.note(b=2, a=3)
    assert read_json(paths.record) == {"a": 3, "b": 2}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"v": 1})
    with pytest.raises(TypeError):
        write_atomic(path, "text is not bytes")  # type: ignore[arg-type]
    assert read_json(path) == {"v": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_damaged_record_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(StorageError, match=r"record\.json"):
        read_json(tmp_path / "record.json")
