"""One canonical form, role order, old responses and ids."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.records import Message
from tasks.validation.canonical import conversation
from tasks.validation.identity import digests, prompt_id, prompt_turns
from tasks.validation.order import check_order
from tasks.validation.policy import make_policy
from tasks.validation.reasons import EXPLANATIONS, Reason, RowError
from tasks.validation.responses import Judge, judge_response, normalise
from tasks.validation.settings import SourceSettings
from validation_rows import SmallTarget, chat


def reason_of(row: Any, **options: Any) -> Reason:
    policy = make_policy(SourceSettings(paths=("x",)), options.pop("target", None), **options)
    with pytest.raises(RowError) as caught:
        policy.keep(row)
    return caught.value.reason


def turn(role: str, content: str = "text", calls: str | None = None) -> tuple[Any, ...]:
    return (role, content, None, calls, None, None)


def test_every_reason_has_one_line_of_documentation() -> None:
    assert all(EXPLANATIONS[reason.value].endswith(".") for reason in Reason)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {"conversations": json.dumps([{"from": "User", "value": "hi"}, {"from": "bing", "value": "ho"}])},
        {"prompt": "hi", "response": "ho"},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "h"}, "i"]}], "completion": "ho"},
    ],
)
def test_all_forms_become_the_same_turns(row: dict[str, Any]) -> None:
    turns, tools = conversation(row)
    assert turns == [turn("user", "hi"), turn("assistant", "ho")] and tools is None


def test_spec_bench_turns_have_placeholders_between_them() -> None:
    turns, _ = conversation({"turns": ["a", "b", "c"]})
    assert [t[0] for t in turns] == ["user", "assistant"] * 2 + ["user"]
    assert [t[1] for t in turns] == ["a", "", "b", "", "c"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], Reason.NOT_AN_OBJECT),
        ({"text": "x"}, Reason.NO_CONVERSATION),
        ({"messages": []}, Reason.NO_MESSAGES),
        ({"messages": "hello"}, Reason.BAD_MESSAGE),
        ({"messages": ["hello"]}, Reason.BAD_MESSAGE),
        ({"messages": [{"role": "narrator", "content": "x"}]}, Reason.UNKNOWN_ROLE),
        ({"messages": [{"role": ["user"], "content": "x"}]}, Reason.UNKNOWN_ROLE),
        ({"messages": [{"role": "user", "content": 7}]}, Reason.BAD_CONTENT_TYPE),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, Reason.UNSUPPORTED_CONTENT_PART),
        ({"messages": [{"role": "user", "content": " \n"}]}, Reason.EMPTY_USER_TURN),
        ({**chat("q"), "tools": {"a": 1}}, Reason.BAD_TOOLS),
        ({"messages": [{"role": "assistant", "content": "a"}]}, Reason.NO_USER_TURN),
    ],
)
def test_unusable_prompts_are_rejected_with_their_reason(row: Any, reason: Reason) -> None:
    assert reason_of(row) is reason


def test_tool_calls_are_one_stored_form_whatever_they_were() -> None:
    def stored(arguments: Any) -> str | None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]}
        return conversation(row)[0][1][3]

    assert stored('{"b": 1, "a": null}') == stored({"b": 1, "a": None})
    call = json.loads(stored({"b": 1, "a": None}) or "")[0]
    assert json.loads(call["function"]["arguments"]) == {"b": 1, "a": None}
    assert "123456789012345678901" in (stored('{"n": 123456789012345678901}') or "")


@pytest.mark.parametrize("calls", [7, [1], [{"function": {}}], [{"name": "f", "arguments": "{"}], "[1"])
def test_a_bad_tool_call_is_a_reject(calls: Any) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}]}
    assert reason_of(row) is Reason.BAD_TOOL_CALL


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        ("system user", None),
        ("user assistant user", None),
        ("user call tool tool assistant user", None),
        ("user user", Reason.BAD_ROLE_ORDER),
        ("user assistant assistant user", Reason.BAD_ROLE_ORDER),
        ("user system", Reason.BAD_ROLE_ORDER),
        ("user assistant tool", Reason.BAD_ROLE_ORDER),
        ("user tool", Reason.BAD_ROLE_ORDER),
        ("assistant user", Reason.STARTS_WITH_ASSISTANT),
        ("system call tool", Reason.NO_USER_TURN),
    ],
)
def test_role_order(roles: str, reason: Reason | None) -> None:
    turns = [turn("assistant", "", "[]") if r == "call" else turn(r) for r in roles.split()]
    if reason is None:
        check_order(turns)
        return
    with pytest.raises(RowError) as caught:
        check_order(turns)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", Reason.EMPTY_ASSISTANT),
        ("OK.", Reason.TOO_FEW_SUPERVISED_TOKENS),
        ("<think>\n\n</think>\n\nOK.", Reason.TOO_FEW_SUPERVISED_TOKENS),
        ("<think>\n\n</think>\n\n<think>\nmore\n</think>\n\nOK.", Reason.DUPLICATE_THINK_BLOCK),
        ("<think>\nnever closed", Reason.UNCLOSED_THINK_BLOCK),
        ("I write <think> as text </think> here and go on for a while", Reason.UNCLOSED_THINK_BLOCK),
    ],
)
def test_a_bad_old_response_is_kept_to_regenerate_and_rejected_to_train(answer: str, reason: Reason) -> None:
    row = chat("why?", answer)
    assert reason_of(row, for_training=True) is reason
    kept = make_policy(SourceSettings(paths=("x",)), None).keep(row)
    assert kept.regenerate_reason == reason.value
    assert [t[0] for t in kept.turns] == ["user"]


def test_inline_thinking_moves_to_its_own_field() -> None:
    turns, _ = conversation(chat("5*5?", "<think>\nfive fives\n</think>\n\n25"))
    assert normalise(turns, Judge())[1][1:3] == ("25", "five fives")
    opened_in_prompt, _ = conversation(chat("5*5?", "five fives\n</think>\n\n25"))
    assert normalise(opened_in_prompt, Judge()) == normalise(turns, Judge())


def test_training_needs_an_answer_at_the_end() -> None:
    assert reason_of(chat("q"), for_training=True) is Reason.MUST_END_WITH_ASSISTANT


def test_the_floor_counts_the_targets_tokens() -> None:
    turns, _ = conversation(chat("q", "one two three"))
    judge_response(turns, Judge(min_content_tokens=3, count=lambda text: len(text.split())))
    with pytest.raises(RowError):
        judge_response(turns, Judge(min_content_tokens=4, count=lambda text: len(text.split())))


def test_control_tokens_in_text_are_rejected_or_kept_as_text() -> None:
    row, target = chat("say <|end|> now"), SmallTarget()
    assert reason_of(row, target=target) is Reason.CONTROL_TOKEN_IN_CONTENT
    encode = SourceSettings(paths=("x",), control_tokens="encode")
    assert make_policy(encode, target).keep(row).turns[0][1] == "say <|end|> now"  # type: ignore[arg-type]


def test_the_id_forgets_the_answer_and_remembers_the_prompt() -> None:
    def ids(row: dict[str, Any], samples: int = 1) -> list[str]:
        turns, tools = conversation(row)
        return digests(prompt_turns(turns), tools, samples)

    assert ids(chat("q", "a")) == ids(chat("q", "b")) == ids(chat("q"))
    assert ids(chat("q")) != ids(chat("q "))
    assert ids({**chat("q"), "tools": [{"name": "t"}]}) != ids(chat("q"))
    three = ids(chat("q"), 3)
    assert len(set(three)) == 3 and three[0] == ids(chat("q"))[0] and len(three[0]) == 32


@given(st.lists(st.text(), min_size=1, max_size=4), st.integers(0, 3))
def test_ids_of_turns_and_of_messages_are_the_same(texts: list[str], sample: int) -> None:
    roles = ("user", "assistant")
    messages = [Message(roles[i % 2], text) for i, text in enumerate(texts)]  # type: ignore[arg-type]
    turns = [turn(m.role, m.content) for m in messages]
    try:
        expected = digests(prompt_turns(turns), None, 4)[sample]  # type: ignore[arg-type]
    except TypeError:  # a lone surrogate: no such text passes the reader
        return
    assert prompt_id(messages, None, sample) == expected
