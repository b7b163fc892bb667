"""The target's own words: rendering, tokens, control tokens, answers and turns."""

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from targets import (
    CHATML,
    FAMILY_SPECIALS,
    chatml_target,
    custom_target,
    family_target,
    qwen36,
    small_tokenizer,
    write_target,
)
from tasks.errors import TargetError
from tasks.records import Message
from tasks.settings import TargetSettings
from tasks.target.family import FAMILIES, find_family
from tasks.target.load import load_target

CALLS = json.dumps(
    [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "lookup", "arguments": json.dumps({"city": "Oslo", "n": 3})},
        }
    ]
)


def test_digests_ids_and_generation_config_of_the_real_target():
    target = qwen36()
    assert target.family.name == "qwen3.6"
    assert target.template_sha256.startswith("e84f32a23fdd")
    assert target.eos_ids == (248046, 248044)
    assert target.generation_config["top_k"] == 20
    assert target.encode("<think>") == [248068]
    assert {"<|im_start|>", "<think>", "<tool_call>", "<|image_pad|>", "<|fim_prefix|>"} <= target.control_tokens


def test_generation_prompt_follows_the_thinking_switch():
    target, messages = qwen36(), [Message("user", "hi")]
    assert target.render(messages).endswith("<|im_start|>assistant\n<think>\n")
    assert target.render(messages, thinking=False).endswith("<think>\n\n</think>\n\n")
    assert target.prompt_ids(messages) == target.encode(target.render(messages))


@pytest.mark.parametrize("name", ["qwen3_6", "qwen3_8"])
def test_earlier_thinking_is_kept_only_when_asked_whatever_the_templates_default(name: str):
    messages = [Message("user", "a"), Message("assistant", "b", "EARLIER"), Message("user", "c")]
    assert "EARLIER" not in family_target(name).render(messages)
    assert "EARLIER" in family_target(name).render(messages, preserve_thinking=True)


def test_the_templates_own_message_is_in_the_error():
    with pytest.raises(ValueError, match="No user query found"):
        qwen36().render([Message("system", "x")])


@pytest.mark.parametrize("name", sorted(FAMILY_SPECIALS))
def test_families_are_found_and_rows_split_back_into_their_messages(name: str):
    target = family_target(name)
    assert target.family.name != "inferred"
    messages = [
        Message("user", "Why is it so?\n\nTell me <|im_end|> and <think>"),
        Message("assistant", "Because the light is scattered."),
        Message("user", "And then?"),
    ]
    ids = target.prompt_ids(messages)
    split = target.split_conversation(ids)
    assert [m for m in split if m.role == "user"] == [messages[0], messages[2]]
    assert next(m.content for m in split if m.role == "assistant") == messages[1].content
    turns = [m for m in split if m.role != "assistant" or m.content]
    assert [m.role for m in turns] == ["user", "assistant", "user"]
    assert target.prompt_ids(turns) == ids


@pytest.mark.parametrize("name", ["qwen3_6", "qwen3", "nemotron_3_nano", "glm4moe", "deepseekv3", "gptoss"])
def test_tool_calls_are_read_back_as_the_template_writes_them(name: str):
    target = family_target(name)
    messages = [Message("user", "How warm?"), Message("assistant", "", None, CALLS)]
    prompt = target.render(messages[:1], thinking=False)
    whole = target.render(messages, thinking=False, add_generation_prompt=False)
    header = target.family.assistant_header
    sampled = whole[len(prompt) :] if whole.startswith(prompt) else whole[whole.rindex(header) + len(header) :]
    answer = target.parse_answer(target.encode(sampled), thinking=False)
    assert answer.content.strip() == ""
    assert json.loads(answer.tool_calls or "null") == json.loads(CALLS)


def test_tool_results_split_back_into_tool_messages():
    target = qwen36()
    messages = [
        Message("user", "How warm?"),
        Message("assistant", "", "look", CALLS),
        Message("tool", "3 C"),
        Message("tool", "<tool_response> is only text here"),
        Message("assistant", "Three degrees.", "read"),
    ]
    ids = target.encode_guarded(target.render_guarded(messages, add_generation_prompt=False))
    assert target.split_conversation(ids) == messages


def test_pads_at_the_end_are_ignored_and_soup_does_not_decode():
    target = qwen36()
    ids = target.prompt_ids([Message("user", "hi")]) + target.encode("ok\n</think>\n\nYes.<|im_end|>")
    assert target.split_conversation(ids + [248044] * 5)[-1] == Message("assistant", "Yes.", "ok")
    for soup in ([1, 2, 3], target.encode("words first <|im_start|>user\nx<|im_end|>")):
        with pytest.raises(ValueError):
            target.split_conversation(soup)
    with pytest.raises(ValueError, match="inside a user turn"):
        target.split_conversation(target.encode("<|im_start|>user\na<|im_end|>b<|im_end|>\n"))


def test_answers_open_closed_and_unfinished():
    target = qwen36()
    done = target.parse_answer(target.encode("why\n</think>\n\nBecause.<|im_end|>"))
    assert (done.reasoning_content, done.content, done.think_closed, done.ends_with_eot) == (
        "why",
        "Because.",
        True,
        True,
    )
    cut = target.parse_answer(target.encode("why and"))
    assert (cut.reasoning_content, cut.content, cut.think_closed, cut.ends_with_eot) == ("why and", "", False, False)
    plain = target.parse_answer(target.encode("Because."), thinking=False)
    assert (plain.reasoning_content, plain.content) == (None, "Because.")


def test_a_call_that_is_not_well_formed_stays_text():
    target = qwen36()
    answer = target.parse_answer(target.encode("a\n</think>\n\n<tool_call>\n<function=f>\n<|im_end|>"))
    assert answer.tool_calls is None and "<tool_call>" in answer.content


def test_scaffold_and_content_of_the_empty_answer():
    target = qwen36()
    text = "<|im_start|>user\nReply.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for answer, content in (("OK.", 2), ("", 0)):
        ids = target.encode(f"{text}{answer}<|im_end|>\n")
        start = ids.index(248069)
        counts = target.count(ids, [0] * start + [1] * (len(ids) - start))
        assert (counts.n_supervised, counts.n_scaffold, counts.n_content) == (content + 4, 4, content)


def test_own_family_from_a_job_file_wins_and_mistakes_are_named():
    own = {"mine": {"base": "chatml", "detect": ["<|im_start|>"], "end_of_turn": "<|im_end|>", "think_open": None}}
    family = find_family("x <|im_start|> y", "auto", own)
    assert family is not None and family.name == "mine" and family.user_header == "<|im_start|>user\n"
    with pytest.raises(TargetError, match="tink_open"):
        find_family("", "auto", {"mine": {"tink_open": "x"}})
    with pytest.raises(TargetError, match="known are"):
        find_family("", "qwen99")
    assert len({f.name for f in FAMILIES}) == len(FAMILIES)


def test_an_unknown_template_is_read_off_its_rendering():
    template = (
        "{% for m in messages %}{{ '[[' + m.role + ']] ' + m.content + '[[done]]\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[[assistant]] ' }}{% endif %}"
    )
    target = custom_target("unknown", template, small_tokenizer(["[[done]]", "[[user]]", "[[assistant]]"]), "[[done]]")
    family = target.family
    assert (family.assistant_header, family.user_header) == ("[[assistant]] ", "[[user]] ")
    assert family.end_of_turn == ("[[done]]",)
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c [[done]]")]
    split = target.split_conversation(target.prompt_ids(messages))
    assert split[:3] == messages


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "cannot load"),
        (lambda d: (d / "chat_template.jinja").unlink(), "no chat template"),
        (lambda d: (d / "chat_template.jinja").write_text("{% for %}"), "does not compile"),
        (lambda d: (d / "chat_template.jinja").write_text("<|im_start|>{{ raise_exception('never') }}"), "never"),
        (lambda d: (d / "config.json").write_text("{"), "not JSON"),
    ],
)
def test_each_missing_or_broken_file_is_one_clear_error(tmp_path, break_it, says):
    folder = write_target(tmp_path / "m", small_tokenizer(["<|im_end|>", "<|im_start|>"], []), CHATML, "<|im_end|>")
    break_it(folder)
    with pytest.raises(TargetError, match=says):
        load_target(TargetSettings(model=str(folder)))


ENDLESS = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
LATER = CHATML.replace("<|im_start|>", "[").replace("<|im_end|>", "]") + "{{ 1 / (3 - messages|length) }}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<|im_start|>{{ 1/0 }}", "fails to render one plain user message.*ZeroDivisionError: division by zero"),
        ("{{ 1/0 }}", "fails to render one plain user message.*ZeroDivisionError: division by zero"),
        (ENDLESS, "fails to render one plain user message.*RecursionError"),
        ("{{ raise_exception('never again') }}", "fails to render one plain user message.*never again"),
        ("{{ mesages[0].content }}", "fails to render one plain user message.*'mesages' is undefined"),
        ("", "renders nothing for one plain user message"),
        ("<|im_start|>{{ nothing }}", "renders only '<|im_start|>'"),
        (LATER, "fails to render plain user and assistant turns.*division by zero"),
        ("{% if x %}" * 150 + "{% endif %}" * 150, "does not compile"),
    ],
)
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "given"])
def test_a_failing_template_is_named_with_its_own_error_and_not_the_tokenizer(tmp_path, text, says, place):
    folder = write_target(tmp_path / "m", small_tokenizer(["<|im_end|>", "<|im_start|>"], []), text, "<|im_end|>")
    path = folder / "chat_template.jinja"
    if place == "tokenizer_config.json":
        path.unlink()
        path = folder / place
        text = text or "{# none #}"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": text}))
    elif place == "given":
        path = path.rename(tmp_path / "own.jinja")
    given = str(path) if place == "given" else None
    with pytest.raises(TargetError, match=f"(?s){says}") as caught:
        load_target(TargetSettings(model=str(folder), chat_template=given))
    error = str(caught.value)
    assert str(path) in error and "target.chat_template" in error and "tokenizer.json" not in error


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", [[[1]], "2", [None], {"a": 1}, True, [1.5]])
def test_end_of_sequence_ids_that_are_none_name_their_file(tmp_path, name, value):
    folder = write_target(tmp_path / "m", small_tokenizer(["<|im_end|>", "<|im_start|>"], []), CHATML, "<|im_end|>")
    (folder / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(TargetError, match=f"{name}: eos_token_id is .*expected a token id") as caught:
        load_target(TargetSettings(model=str(folder)))
    assert json.dumps(value) in str(caught.value) and "tokenizer.json" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_found(tmp_path):
    folder = write_target(tmp_path / "m", small_tokenizer(["<s>"], []), CHATML, "<s>")
    with pytest.raises(TargetError, match="does not match the chat template"):
        load_target(TargetSettings(model=str(folder)))
    with pytest.raises(TargetError, match="not a directory"):
        load_target(TargetSettings(model=str(tmp_path / "nothing")))


def test_a_template_file_overrides_the_models_own(tmp_path):
    folder = write_target(tmp_path / "m", small_tokenizer(["<|im_end|>", "<|im_start|>"], []), "unused", "<|im_end|>")
    other = tmp_path / "other.jinja"
    other.write_text(CHATML)
    target = load_target(TargetSettings(model=str(folder), chat_template=str(other)))
    assert target.family.name == "chatml"
    assert pickle.loads(pickle.dumps(target)) is target


def test_a_template_that_prints_the_date_reads_a_frozen_clock():
    target = family_target("gptoss")
    assert target.reads_clock
    assert target.render([Message("user", "x")]) == target.render([Message("user", "x")])


SOUP = st.lists(
    st.one_of(
        st.sampled_from(["<|im_end|>", "<|im_start|>", "assistant\n", "<think>", "</think>", "\n", " "]),
        st.text(max_size=8),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(SOUP, min_size=1, max_size=3))
def test_text_never_opens_or_closes_a_turn(texts: list[str]):
    target = family_target("qwen3_6")
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    messages = [Message("user", "start")]
    for text in texts:
        messages += [Message("assistant", "fine"), Message("user", text)]
    starts = target.tokenizer.token_to_id("<|im_start|>")
    try:
        ids = target.prompt_ids(messages)
    except ValueError as error:
        assert "noncharacters" in str(error)
        return
    assert ids.count(starts) == len(messages) + 1
    split = target.split_conversation(ids)
    assert [m.role for m in split] == [*(m.role for m in messages), "assistant"]
    said = [m.content for m in split if m.role == "user"]
    assert said == [m.content.strip() for m in messages if m.role == "user"] or any(
        "<tool_response>" in t for t in texts
    )


def test_default_system_prompt_is_not_taken_for_the_users():
    target = chatml_target()
    messages = [Message("user", "hi"), Message("assistant", "hello there"), Message("user", "bye")]
    split = target.split_conversation(target.prompt_ids(messages))
    assert split[:3] == messages
    own = [Message("system", "My own."), *messages]
    assert target.split_conversation(target.prompt_ids(own))[:4] == own
