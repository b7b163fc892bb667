"""Small parts of the flow: how errors are logged, and what earlier starts of a run have spent."""

import json
import logging
from pathlib import Path

import pytest

from flows.plain_logs import WordedErrors
from flows.reporter import seconds_before
from flows.stages import _sentence
from tasks.errors import GateError
from tasks.generation.breaker import whole_run
from tasks.generation.settings import BreakerSettings


def logged(error: Exception, message: str, *arguments: object) -> tuple[str, bool]:
    record = logging.LogRecord(
        "prefect.flow_runs", logging.ERROR, "", 0, message, arguments, (type(error), error, None)
    )
    assert WordedErrors().filter(record)
    return record.getMessage(), record.exc_info is not None


def test_a_worded_error_is_logged_without_traceback_and_without_its_evidence() -> None:
    error = GateError("MTP is off; start the server with it", {"gate": "mtp", "details": {"bulk": "x" * 5000}})
    for message, arguments in (("it failed: %r", (error,)), (f"it failed: {error!r}", ())):
        assert logged(error, message, *arguments) == (
            "it failed: GateError: MTP is off; start the server with it",
            False,
        )


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    error = KeyError("slot")
    assert logged(error, "it failed: %r", error) == ("it failed: KeyError('slot')", True)


@pytest.mark.parametrize("torn", ["", '{"time_s": 3, "elap'])
def test_the_time_of_earlier_starts_is_read_from_the_last_whole_line(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "progress.jsonl"
    assert seconds_before(path) == 0.0
    path.write_text("".join(json.dumps({"elapsed_s": s}) + "\n" for s in (2.0, 61.5)) + torn)
    assert seconds_before(path) == 61.5


@pytest.mark.parametrize(
    ("done", "failed", "mode", "verdict", "stops"),
    [
        (80, 20, "enforce", "WITHIN_BUDGET", False),
        (79, 21, "enforce", "OVER_BUDGET", True),
        (79, 21, "monitor", "OVER_BUDGET", False),
        (3, 6, "enforce", "WITHIN_BUDGET", False),  # too few to say anything
        (0, 0, "enforce", "WITHIN_BUDGET", False),
    ],
)
def test_a_run_with_too_many_failures_in_all_is_not_published(
    done: int, failed: int, mode: str, verdict: str, stops: bool
) -> None:
    report = whole_run(
        done, failed, BreakerSettings.model_validate({"mode": mode, "max_bad_share": 0.2, "min_answers": 100})
    )
    assert (report.verdict, report.stops) == (verdict, stops)
    assert bool(report.next_steps) == (verdict == "OVER_BUDGET")


def test_what_to_do_is_told_in_sentences() -> None:
    assert [_sentence(t) for t in ("is it in the checkpoint?", "set target.mtp to false", "Stop.")] == [
        "Is it in the checkpoint?", "Set target.mtp to false.", "Stop.",
    ]  # fmt: skip
