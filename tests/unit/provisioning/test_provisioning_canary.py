"""The thinking canary: recorded answers, other engines, and servers that are not there."""

import dataclasses
import json

import pytest

from paths import shared
from targets import qwen36
from tasks.client.answers import read_answer
from tasks.client.outcomes import ChatOutcome, OutcomeKind
from tasks.provisioning.canary import Seen, checks, judge, look, thinking_canary
from tasks.records import Capabilities, Level, Server
from tasks.settings import SamplingSettings

SGLANG = Server("s0", "http://127.0.0.1:9", "m", "sglang", "0.5.17", capabilities=Capabilities(return_token_ids=True))
THINKING = SamplingSettings(thinking=True)


def recorded(name: str, version: str = "0.5.17") -> ChatOutcome:
    record = json.loads(shared(f"captures/sglang-{version}-h200/tiny-mtp-eagle/{name}.json").read_text())
    return read_answer(record["status"], json.dumps(record["body"]).encode(), 0.1)


def seen(**facts: object) -> Seen:
    base = {
        "server": "s0",
        "engine": "sglang",
        "answered": True,
        "reasoning": "Hm.",
        "content": "Yes.",
        "think_closed": True,
    }
    return Seen(**{**base, "markers_in_content": False, "ids": 9, "cut": False, **facts})  # type: ignore[arg-type]


def test_a_recorded_answer_passes() -> None:
    one = look(SGLANG, recorded("chat_token_ids"), None)
    assert (one.ids, one.think_closed) == (22, True)
    report = judge([one], THINKING, "enforce")
    assert (report.verdict, report.level, report.stops) == ("THINKING", Level.OK, False)
    assert len(report.expectations) == 6


def test_a_recorded_answer_cut_in_thinking_stops_the_run() -> None:
    report = judge([look(SGLANG, recorded("chat_token_ids_cut_in_thinking"), None)], THINKING, "enforce")
    assert report.verdict == "NOT_THINKING" and report.stops
    failed = {item.name.split(": ")[1] for item in report.expectations if not item.passed}
    assert failed == {"content", "think block closes"}


def test_a_recorded_answer_without_ids_is_told() -> None:
    report = judge([look(SGLANG, recorded("chat"), None)], THINKING, "monitor")
    assert report.verdict == "NO_TOKEN_IDS"
    old = dataclasses.replace(SGLANG, version="0.5.11", capabilities=Capabilities(generate_endpoint=True))
    assert judge([look(old, recorded("chat", "0.5.11"), None)], THINKING, "enforce").level is Level.WARNING
    assert [item.name for item in report.expectations if not item.passed] == ["s0: token ids come back"]
    assert not report.stops


def test_no_reasoning_parser_shows_as_markers_in_the_content() -> None:
    found = {
        item.name.split(": ")[1]: item.passed for item in checks(seen(reasoning=None, markers_in_content=True), True)
    }
    assert not found["reasoning in its own field"] and not found["no think markers in the content"]


def test_without_thinking_no_reasoning_may_come() -> None:
    quiet = SamplingSettings(thinking=False)
    assert judge([seen(reasoning=None)], quiet, "enforce").verdict == "ANSWERING"
    assert judge([seen()], quiet, "enforce").stops


@pytest.mark.parametrize("engine", ["openai", "llama.cpp"])
def test_other_engines_degrade_to_unknown_with_a_warning(engine: str) -> None:
    report = judge([seen(engine=engine, reasoning=None, ids=None, think_closed=None)], THINKING, "enforce")
    assert (report.verdict, report.level, report.stops) == ("UNKNOWN", Level.WARNING, False)
    assert report.next_steps


def test_a_target_without_think_block_is_a_warning() -> None:
    report = judge([seen(reasoning=None, think_closed=None)], THINKING, "enforce", possible=False)
    assert report.level is Level.WARNING


def test_an_answer_that_does_not_come_stops_whatever_the_engine() -> None:
    report = judge([seen(engine="openai", answered=False, detail="connection refused")], THINKING, "enforce")
    assert report.stops and "connection refused" in report.summary


async def test_a_server_that_is_not_there_is_a_finding_not_a_crash() -> None:
    report = await thinking_canary([SGLANG], None, THINKING)
    assert report.stops and report.verdict == "NOT_THINKING"


def test_ids_are_read_with_the_targets_own_markers() -> None:
    target = qwen36()
    text = "\nLet me see.\n</think>\n\nForty-two.<|im_end|>"
    ids = target.encode(text)
    outcome = ChatOutcome(OutcomeKind.OK, content=text, token_ids=ids, ids_source="server", parsed=False)
    one = look(SGLANG, outcome, target)
    assert (one.think_closed, one.content.strip()) == (True, "Forty-two.")
    assert one.reasoning and "Let me see" in one.reasoning
    unclosed = look(SGLANG, ChatOutcome(OutcomeKind.CUT, token_ids=target.encode("\nLet me"), parsed=False), target)
    assert unclosed.think_closed is False and unclosed.cut
