"""A crash between any two steps of finishing a chunk loses nothing and doubles nothing."""

import shutil
from pathlib import Path

import pytest

from runs_for_tests import check_accounts, engine, failures, finish, new_run, prompts
from simulator import FaultPlan, SimFleet, SimSettings
from tasks.errors import StorageError
from tasks.generation import writer
from tasks.generation.plan import ledger
from tasks.runs import RunPaths

FAST = SimSettings(median_tokens=50, sigma=0.6, speedup=300)
STEPS = ("before completions", "before failed", "before record", "before journal")


def crash_at(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the chunk's end stop at `step`, as a power cut would: what is renamed stays, the rest is not there."""
    names = {"before completions": "completions.parquet", "before failed": "failed.parquet"}
    if step in names:
        real = writer._File.commit

        def commit(file: writer._File) -> None:
            if file._path.name == names[step]:
                raise OSError(5, "power cut")
            real(file)

        monkeypatch.setattr(writer._File, "commit", commit)
    elif step == "before record":

        def refuse(path: Path, value: object) -> None:
            raise OSError(5, "power cut")

        monkeypatch.setattr(writer, "write_json", refuse)
    else:
        real_finalize = writer.finalize

        def finalize(*arguments: object) -> object:
            real_finalize(*arguments)  # type: ignore[arg-type]
            raise StorageError("power cut")

        monkeypatch.setattr("tasks.generation.chunks.finalize", finalize)


async def crash(paths: RunPaths, fleet: SimFleet, **changes: object) -> None:
    running = engine(paths, fleet, chunk_rows=100, **changes)
    running.start()
    with pytest.raises(StorageError, match="power cut"):
        await running.wait_chunk(0)
    await running.stop()


@pytest.mark.parametrize("step", STEPS)
async def test_a_crash_while_a_chunk_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    made = prompts(40)
    paths = new_run(tmp_path, made)
    with SimFleet(1, FAST, faults=FaultPlan(always={"question 1": "empty"})) as fleet:
        with monkeypatch.context() as patch:
            crash_at(step, patch)
            await crash(paths, fleet)
        books = ledger(paths)
        assert (len(books.done), len(books.failed), len(books.pending)) == (29, 11, 0)
        asked = fleet.servers[0].requests
        await finish(engine(paths, fleet, chunk_rows=100))
        assert fleet.servers[0].requests == asked  # everything was in the journal
    done, failed = check_accounts(paths, made)
    assert (len(done), len(failed)) == (29, 11)
    assert not list(paths.chunks.glob("*/.*"))


@pytest.mark.parametrize("step", STEPS)
async def test_a_crash_while_failures_are_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    made = prompts(40)
    paths = new_run(tmp_path, made)
    with SimFleet(1, FAST, faults=FaultPlan(always={"question 1": "empty", "question 2": "empty"})) as fleet:
        await finish(engine(paths, fleet, chunk_rows=100))
    assert len(failures(paths)) == 22
    with SimFleet(1, FAST, faults=FaultPlan(always={"question 2": "empty"})) as fleet:
        with monkeypatch.context() as patch:
            crash_at(step, patch)
            await crash(paths, fleet, retry_failed=True)
        await finish(engine(paths, fleet, chunk_rows=100))  # a begun retry is finished whatever the spec says now
    done, failed = check_accounts(paths, made)
    assert (len(done), len(failed)) == (29, 11)
    assert not list(paths.chunks.glob("*/journal*"))


async def test_a_stale_journal_beside_a_finished_chunk_is_removed(tmp_path: Path) -> None:
    made = prompts(10)
    paths = new_run(tmp_path, made)
    with SimFleet(1, FAST) as fleet:
        running = engine(paths, fleet)
        chunk = running._store.open(0)
        chunk.journal.close()
        copy = tmp_path / "copy"
        shutil.copy(chunk.journal.path, copy)
        await finish(running)
        shutil.copy(copy, chunk.journal.path)
        await finish(engine(paths, fleet))
    assert not chunk.journal.path.exists()
    check_accounts(paths, made)
