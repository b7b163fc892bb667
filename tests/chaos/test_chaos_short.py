"""The chaos suite at CI size; `python tests/chaos/run_chaos.py --seeds 50` is the full one."""

import json
from pathlib import Path

import polars as pl
import pytest
from chaos_harness import LIMIT, SERVERS, case

from runs_for_tests import check_accounts, finish
from runs_for_tests import engine as new_engine
from simulator import FaultPlan, SimFleet, SimSettings
from tasks.generation.plan import ledger
from tasks.generation.prompts import PromptFile
from tasks.runs import RunPaths
from tasks.validation.run import validate
from tasks.validation.settings import SourceSettings


@pytest.mark.parametrize(
    ("fault", "seed"),
    [("none", 0), ("none", 2), ("reset", 1), ("empty", 1), ("truncated", 2), ("crash", 0), ("hang", 1), ("wedge", 0)],
)
def test_killed_and_resumed(tmp_path: Path, fault: str, seed: int) -> None:
    result = case(fault, seed, tmp_path)
    assert result.done + result.failed == 48
    if fault == "none":
        assert result.failed == 0
        assert result.redone <= LIMIT * SERVERS


async def test_every_input_row_is_accounted_for_to_the_end(tmp_path: Path) -> None:
    """input = kept + rejected + duplicates and kept = done + failed + pending, by id, with real validation before."""
    source = tmp_path / "input.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"question number {i % 70}"}]} for i in range(80)]
    rows += [{"messages": [{"role": "alien", "content": "x"}]}, {"messages": []}]
    source.write_text("\n".join(json.dumps(row) for row in rows) + "\n{broken\n")
    paths = RunPaths(tmp_path / "set", "run1")
    paths.run_dir.mkdir(parents=True)
    result = validate(SourceSettings(paths=(str(source),)), None, paths.run_dir)
    assert result.rows == result.kept + result.rejected + result.duplicates == 83
    assert (result.kept, result.duplicates) == (70, 10)
    with SimFleet(2, SimSettings(median_tokens=40, speedup=200), faults=FaultPlan(rates={"empty": 0.5})) as fleet:
        await finish(new_engine(paths, fleet, max_attempts=2, chunk_rows=30))
    kept = PromptFile(paths.prompts).column("prompt_id", 0, result.kept)
    books = ledger(paths)
    assert books.done | books.failed == set(kept) and not books.pending
    assert books.failed
    rejected = pl.read_parquet(paths.rejected)
    assert len(rejected) == result.rejected + result.duplicates
    assert len({*kept}) == result.kept
    check_accounts(paths, [_prompt(identifier) for identifier in kept])


def _prompt(identifier: str):
    from tasks.records import Prompt

    return Prompt(identifier, ())
