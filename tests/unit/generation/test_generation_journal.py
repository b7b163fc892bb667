"""The journal survives what a crash leaves, and refuses what is not a crash."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.errors import SpecError, StorageError
from tasks.generation.journal import Journal, Kind, replay

IDENTITY = {"identity_digest": "abc"}


def write(path: Path, count: int) -> bytes:
    journal = Journal.open(path, IDENTITY)
    for row in range(count):
        journal.append(row, 0, Kind.LAST, {"content": "x" * (row % 50), "token_ids": list(range(row % 20))})
    journal.close()
    return path.read_bytes()


def test_records_come_back(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 10)
    journal = Journal.open(path, IDENTITY)
    entries = list(replay(journal.entries))
    assert [(e.row, e.kind) for e in entries] == [(row, Kind.LAST) for row in range(10)]
    assert journal.load(entries[3])["content"] == "xxx"
    assert journal.cut_bytes == 0
    journal.close()


@given(cut=st.integers(min_value=1, max_value=4000), garbage=st.binary(max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_tail_torn_anywhere_is_cut_and_writing_goes_on(
    tmp_path_factory: pytest.TempPathFactory, cut: int, garbage: bytes
) -> None:
    path = tmp_path_factory.mktemp("torn") / "journal"
    data = write(path, 20)
    keep = max(8, len(data) - cut)
    path.write_bytes(data[:keep] + garbage * (cut % 2))
    journal = Journal.open(path, IDENTITY)
    rows = [entry.row for entry in replay(journal.entries)]
    assert rows == list(range(len(rows)))
    journal.append(99, 0, Kind.LAST, {"content": "after"})
    journal.close()
    again = Journal.open(path, IDENTITY)
    assert [entry.row for entry in replay(again.entries)] == [*rows, 99]
    assert again.cut_bytes == 0
    again.close()


def test_zeros_after_a_power_cut_are_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = write(path, 5)
    path.write_bytes(data + bytes(4096))
    journal = Journal.open(path, IDENTITY)
    assert len(list(replay(journal.entries))) == 5
    assert journal.cut_bytes == 4096
    journal.close()


def test_damage_in_the_middle_is_an_error_that_names_the_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = bytearray(write(path, 20))
    entries = Journal.open(path, IDENTITY).entries
    data[entries[10].offset + 3] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"record 10 .* not a torn write"):
        Journal.open(path, IDENTITY)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = write(path, 3)
    rng = random.Random(0)
    for _ in range(100):
        at = rng.randrange(8, len(data))
        broken = bytearray(data)
        broken[at] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        try:
            journal = Journal.open(path, IDENTITY)
        except (StorageError, SpecError):
            continue
        assert len(journal.entries) < 4 or journal.cut_bytes
        journal.close()


def test_another_spec_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 2)
    with pytest.raises(SpecError, match="identity_digest: 'abc' there, 'xyz' now"):
        Journal.open(path, {"identity_digest": "xyz"})


def test_a_foreign_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"thesis.docx, chapter one")
    with pytest.raises(StorageError, match="not a journal"):
        Journal.open(path, IDENTITY)
    assert path.read_bytes() == b"thesis.docx, chapter one"


def test_a_disk_that_refuses_leaves_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    path = tmp_path / "journal"
    journal = Journal.open(path, IDENTITY)
    journal.append(0, 0, Kind.LAST, {"content": "kept"})
    real = os.pwrite

    def full(handle: int, data: bytes, offset: int) -> int:
        if len(data) > 20:
            return real(handle, data[:10], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left"):
        journal.append(1, 0, Kind.LAST, {"content": "x" * 10})
    monkeypatch.undo()
    journal.append(2, 0, Kind.LAST, {"content": "later"})
    journal.close()
    again = Journal.open(path, IDENTITY)
    assert [entry.row for entry in replay(again.entries)] == [0, 2]
    again.close()
