"""Answers cut at the output limit are counted by turn and by conversation."""

import polars as pl
import pytest

from tasks.cuts import count_cuts, cut_text


def write(path, finishes, cut_reasons):
    turns = [[{"turn": n, "finish_reason": finish} for n, finish in enumerate(row)] for row in finishes]
    pl.DataFrame({"turns": turns, "cut_reason": cut_reasons}).write_parquet(path)
    return path


def test_cut_turns_conversations_and_early_ends(tmp_path):
    finishes = [["stop", "length"], ["length", "length"], ["stop"], ["length"], ["tool_calls"]]
    reasons = ["TRUNCATED_BY_LENGTH", None, None, None, "TOOL_CALLS_DIFFER"]
    counts = count_cuts(write(tmp_path / "c.parquet", finishes, reasons))
    assert counts == {"conversations": 5, "turns": 7, "cut_conversations": 3, "cut_turns": 4, "ended_by_cut": 1}
    assert cut_text(counts) == "3 conversations, 4 of 7 turns; 1 ended there, before the last turn"


@pytest.mark.parametrize(
    ("finishes", "text"), [(["stop", "stop"], "none of 2 turns"), (["length"], "1 conversation, 1 of 1 turn")]
)
def test_words(tmp_path, finishes, text):
    assert cut_text(count_cuts(write(tmp_path / "c.parquet", [finishes], [None]))) == text


def test_a_file_that_does_not_tell_counts_nothing(tmp_path):
    pl.DataFrame({"prompt_id": ["a"]}).write_parquet(tmp_path / "c.parquet")
    assert (count_cuts(tmp_path / "c.parquet"), cut_text({})) == ({}, "")
