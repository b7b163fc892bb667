"""One row an assistant turn; the mask is what the target sampled."""

from datetime import UTC, datetime, timedelta

import pytest

from completions import assistant, batch, completion, served, turn_of, without_ids
from targets import FAMILY_SPECIALS, chatml_target, family_target, qwen36
from tasks.records import Message
from tasks.target.text import TargetText
from tasks.tokenization.rows import Built, RowBuilder
from tasks.tokenization.settings import TokenizationSettings

ANSWER = "The sky is blue because short waves scatter more in the air than long ones do."
THOUGHT = "Think of scattering. Short waves scatter more."
CALLS = '[{"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": "{\\"city\\": \\"Oslo\\"}"}}]'


def build(target: TargetText, rows: list[dict], preserve: bool = False, **settings) -> Built:
    return RowBuilder(target, TokenizationSettings(**{"min_content_tokens": 1, **settings}), preserve).build(
        batch(rows)
    )


def supervised(target: TargetText, built: Built, row: int = 0) -> str:
    ids = built.tokens.column("input_ids")[row].as_py()
    mask = built.tokens.column("loss_mask")[row].as_py()
    assert len(ids) == len(mask)
    return target.decode([i for i, m in zip(ids, mask, strict=True) if m])


def reasons(built: Built) -> list[str]:
    return built.rejected.column("reason").to_pylist()


def test_server_ids_are_taken_as_they_are():
    target = qwen36()
    messages = [Message("user", "Why is the sky blue?"), assistant(ANSWER, THOUGHT)]
    row = served(target, "p", messages, [f"{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>"])
    built = build(target, [row])
    assert reasons(built) == []
    turn = row["turns"][0]
    assert built.tokens.column("input_ids")[0].as_py() == turn["prompt_token_ids"] + turn["token_ids"]
    assert supervised(target, built) == f"{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>"
    assert built.tokens.column("ids_exact").to_pylist() == [True]
    assert built.tokens.column("token_source").to_pylist() == ["server"]


def test_text_gives_the_same_row_as_ids_when_nothing_drifted():
    target = qwen36()
    messages = [Message("user", "Why is the sky blue?"), assistant(ANSWER, THOUGHT)]
    row = served(target, "p", messages, [f"{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>"])
    exact, text = build(target, [row]).tokens, build(target, [without_ids(row)]).tokens
    for name in ("input_ids", "loss_mask", "n_supervised", "n_scaffold", "n_content"):
        assert exact.column(name).equals(text.column(name)), name
    assert text.column("ids_exact").to_pylist() == [False]
    assert text.column("retokenized_difference").to_pylist() == [0]


def test_a_prompt_that_the_server_rendered_differently_is_a_reject():
    target = qwen36()
    messages = [Message("user", "Why?"), assistant(ANSWER, THOUGHT)]
    row = served(target, "p", messages, [f"{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>"])
    row["turns"][0]["prompt_token_ids"][3] += 1
    built = build(target, [row])
    assert reasons(built) == ["RENDER_MISMATCH"]
    assert "part at 3" in built.rejected.column("detail")[0].as_py()


def test_an_engine_without_prompt_ids_is_held_to_their_number():
    target = qwen36()
    messages = [Message("user", "Why?"), assistant(ANSWER, THOUGHT)]
    row = served(target, "p", messages, [f"{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>"])
    prompt = row["turns"][0]["prompt_token_ids"]
    row["turns"][0] |= {"prompt_token_ids": None, "ids_source": "logprobs"}
    built = build(target, [row])
    assert built.tokens.column("input_ids")[0].as_py() == prompt + row["turns"][0]["token_ids"]
    assert built.tokens.column("ids_exact").to_pylist() == [False]
    row["turns"][0]["prompt_tokens"] += 1
    assert reasons(build(target, [row])) == ["RENDER_MISMATCH"]


def test_a_prompt_sent_before_midnight_is_recognised():
    target, now = family_target("gptoss"), datetime(2026, 3, 2, 0, 10, tzinfo=UTC)
    messages = [Message("user", "Why?"), assistant(ANSWER)]
    sampled = target.encode(f"<|channel|>final<|message|>{ANSWER}<|return|>")
    for days, wanted in ((0, []), (1, []), (9, ["RENDER_MISMATCH"])):
        prompt = target.prompt_ids(messages[:1], now=now - timedelta(days=days))
        row = completion("p", messages, [turn_of(0, messages[1], prompt, sampled)])
        builder = RowBuilder(target, TokenizationSettings(min_content_tokens=1), False, now)
        assert reasons(builder.build(batch([row]))) == wanted


def test_a_missing_stop_id_is_added_where_the_answer_ended_by_itself():
    target = qwen36()
    messages = [Message("user", "Why?"), assistant(ANSWER, THOUGHT)]
    row = served(target, "p", messages, [f"{THOUGHT}\n</think>\n\n{ANSWER}"])
    assert supervised(target, build(target, [row])).endswith("<|im_end|>")
    row["turns"][0]["finish_reason"] = "length"
    assert supervised(target, build(target, [row])).endswith(ANSWER)


def test_a_stop_id_inside_the_answer_is_a_reject():
    target = qwen36()
    row = served(target, "p", [Message("user", "Why?"), assistant(ANSWER)], [f"a</think><|im_end|>{ANSWER}<|im_end|>"])
    assert reasons(build(target, [row])) == ["STOP_TOKEN_INSIDE"]


def test_an_id_beyond_the_vocabulary_is_a_reject():
    target = qwen36()
    row = completion(
        "p", [Message("user", "Why?"), assistant(ANSWER)], [turn_of(0, assistant(ANSWER), None, [5, 10**7])]
    )
    assert reasons(build(target, [row])) == ["ID_OUT_OF_RANGE"]


def test_history_is_what_the_server_saw_with_and_without_earlier_thinking():
    target = qwen36()
    messages = [
        Message("user", "2+2?"),
        assistant("It is 4, as two and two make four.", "FIRSTTHOUGHT"),
        Message("user", "times 3?"),
        assistant("It is 12, as four times three.", "SECONDTHOUGHT"),
    ]
    sampled = [f"{m.reasoning_content}\n</think>\n\n{m.content}<|im_end|>" for m in messages if m.role == "assistant"]
    for preserve in (False, True):
        row = served(target, "p", messages, sampled, preserve_thinking=preserve)
        for rows in ([row], [without_ids(row)]):
            built = build(target, rows, preserve)
            assert built.tokens.column("turn").to_pylist() == [0, 1]
            assert supervised(target, built, 0) == sampled[0]
            assert supervised(target, built, 1) == sampled[1]
            whole = target.decode(built.tokens.column("input_ids")[1].as_py())
            assert ("FIRSTTHOUGHT" in whole) is preserve
    wrong = build(target, [served(target, "p", messages, sampled, preserve_thinking=True)], False)
    assert reasons(wrong) == ["RENDER_MISMATCH"]  # of the second turn: the first has no history


def test_a_tool_loop_keeps_its_thinking():
    target = qwen36()
    messages = [
        Message("user", "How warm is it in Oslo?"),
        assistant("", "LOOPTHOUGHT look it up", CALLS),
        Message("tool", "3 C", tool_call_id="c1"),
        assistant("It is three degrees in Oslo right now.", "Read the result."),
    ]
    built = build(target, [completion("p", messages)])
    call, final = supervised(target, built, 0), supervised(target, built, 1)
    assert "LOOPTHOUGHT" in call and "<function=lookup>" in call and call.endswith("</tool_call><|im_end|>")
    assert "LOOPTHOUGHT" in target.decode(built.tokens.column("input_ids")[1].as_py())
    assert final.startswith("Read the result.") and "LOOPTHOUGHT" not in final


@pytest.mark.parametrize("name", sorted(FAMILY_SPECIALS))
def test_every_family_supervises_exactly_the_answer(name: str):
    target = family_target(name)
    reasoning = THOUGHT if target.family.think_open else None
    messages = [
        Message("user", "Why?"),
        assistant(ANSWER, reasoning),
        Message("user", "Really?"),
        assistant(ANSWER, reasoning),
    ]
    built = build(target, [completion("p", messages)])
    assert reasons(built) == []
    for row in (0, 1):
        text = supervised(target, built, row)
        assert ANSWER in text and "Why?" not in text and "Really?" not in text
        assert any(text.endswith(stop) for stop in (*target.family.end_of_turn, *target.family.implicit_stops))
        assert (THOUGHT in text) is (reasoning is not None)
        ids, mask = (built.tokens.column(name)[row].as_py() for name in ("input_ids", "loss_mask"))
        sampled = [i for i, m in zip(ids, mask, strict=True) if m]
        assert target.parse_answer(sampled).content == ANSWER
        assert target.count(ids, mask).n_content >= len(target.encode(ANSWER))


@pytest.mark.parametrize(
    "name", sorted(n for n in FAMILY_SPECIALS if n not in ("gemma3", "phi3", "gemma4_v5", "llama3_1"))
)
def test_an_answer_cut_in_its_thinking_has_no_end(name: str):
    target = family_target(name)
    if not target.family.think_open:
        messages, turn = (
            [Message("user", "Why?"), assistant(ANSWER)],
            turn_of(0, assistant(ANSWER), finish_reason="length"),
        )
    else:
        answer = assistant("", THOUGHT)
        messages, turn = [Message("user", "Why?"), answer], turn_of(0, answer, finish_reason="length")
    built = build(target, [completion("p", messages, [turn])])
    assert reasons(built) == []
    text = supervised(target, built)
    assert not any(text.endswith(stop) for stop in target.family.end_of_turn)
    assert target.family.think_close == "" or target.family.think_close not in text


def test_plain_chatml_without_thinking_and_with_a_default_system_prompt():
    target = chatml_target()
    built = build(target, [completion("p", [Message("user", "Why?"), assistant(ANSWER)], thinking=False)])
    assert supervised(target, built) == f"{ANSWER}<|im_end|>"
    assert target.decode(built.tokens.column("input_ids")[0].as_py()).startswith("<|im_start|>system\nAnswer briefly.")


def test_thinking_off_supervises_no_think_block():
    target = qwen36()
    built = build(target, [completion("p", [Message("user", "Why?"), assistant(ANSWER)], thinking=False)])
    assert supervised(target, built) == f"{ANSWER}<|im_end|>"


def test_answer_only_masks_the_thinking():
    target = qwen36()
    row = completion("p", [Message("user", "Why?"), assistant(ANSWER, THOUGHT)])
    assert supervised(target, build(target, [row], mask="answer_only")) == f"\n\n{ANSWER}<|im_end|>"


def test_too_long_rows_follow_the_policy_and_minimums_see_the_final_arrays():
    target = qwen36()
    row = completion("p", [Message("user", "Why?"), assistant(ANSWER, THOUGHT)])
    full = build(target, [row]).tokens
    length, sampled = len(full.column("input_ids")[0]), full.column("n_supervised")[0].as_py()
    assert reasons(build(target, [row], max_length=length - 1)) == ["TOO_LONG"]
    assert reasons(build(target, [row], max_length=length)) == []
    cut = build(target, [row], max_length=16, on_too_long="truncate").tokens
    assert len(cut.column("input_ids")[0]) == 16
    assert cut.column("n_supervised")[0].as_py() == sampled - (length - 16)
    emptied = build(target, [row], max_length=16, on_too_long="truncate", min_content_tokens=12)
    assert reasons(emptied) == ["NO_SUPERVISED_TOKENS_AFTER_TRUNCATION"]
    long = completion("q", [Message("user", "word " * 40), assistant(ANSWER, THOUGHT)])
    filled = build(target, [long], max_length=20, on_too_long="truncate")
    assert reasons(filled) == ["NO_SUPERVISED_TOKENS_AFTER_TRUNCATION"]
    assert "fill" in filled.rejected.column("detail")[0].as_py()


def test_every_turn_ends_as_a_row_or_a_reject():
    target = qwen36()
    good = completion("good", [Message("user", "Why?"), assistant(ANSWER, THOUGHT)])
    empty = completion("empty", [Message("user", "Why?"), assistant("")])
    refused = completion("refused", [Message("system", "x"), assistant(ANSWER)])
    lost = completion("lost", [Message("user", "Why?")], [turn_of(0, assistant(ANSWER))])
    short = completion("short", [Message("user", "Why?"), assistant("OK.")])
    built = build(target, [good, empty, refused, lost, short], min_content_tokens=8)
    ended = dict(zip(built.rejected.column("prompt_id").to_pylist(), reasons(built), strict=True))
    assert built.tokens.column("prompt_id").to_pylist() == ["good"]
    assert ended == {
        "empty": "EMPTY_ANSWER",
        "refused": "TEMPLATE_REFUSED",
        "lost": "BAD_ROW",
        "short": "TOO_FEW_SUPERVISED_TOKENS",
    }
