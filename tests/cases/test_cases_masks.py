"""Public faults of masks, templates, tokenizers and caches, each as the row it should have become."""

import json
from importlib.metadata import version

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import processors

from completions import assistant, batch, completion, served, turn_of, write_completions
from paths import shared
from targets import CHATML, chatml_target, custom_target, family_target, qwen36, small_tokenizer, write_target
from tasks.records import Message
from tasks.settings import SamplingSettings, TargetSettings
from tasks.target.load import load_target
from tasks.target.text import TargetText
from tasks.tokenization.fingerprint import digest, fingerprint
from tasks.tokenization.rows import Built, RowBuilder, flat_mask
from tasks.tokenization.run import tokenize_chunk
from tasks.tokenization.schema import MASK_CONVENTION
from tasks.tokenization.settings import TokenizationSettings


def load(folder: str) -> list[dict]:
    """The rows of one case's input."""
    lines, single = shared(f"cases/{folder}"), "input.json"
    if (lines / "input.jsonl").exists():
        return [json.loads(line) for line in (lines / "input.jsonl").read_text().splitlines()]
    return [json.loads((lines / single).read_text())]


def canonical(raw: dict) -> Message:
    """A message of a case in canonical form."""
    calls = raw.get("tool_calls")
    text = json.dumps(calls) if calls else None
    content = raw.get("content") or ""
    return Message(raw["role"], content, raw.get("reasoning_content"), text, raw.get("tool_call_id"))


def row(entry: dict, thinking: bool = True) -> dict:
    return completion(entry.get("id", "row"), [canonical(m) for m in entry["messages"]], thinking=thinking)


def build(target: TargetText, rows: list[dict], preserve: bool = False, **settings) -> Built:
    return RowBuilder(target, TokenizationSettings(**{"min_content_tokens": 0, **settings}), preserve).build(
        batch(rows)
    )


def ids_of(built: Built, index: int = 0) -> list[int]:
    return built.tokens.column("input_ids")[index].as_py()


def said(target: TargetText, built: Built, index: int = 0) -> str:
    mask = built.tokens.column("loss_mask")[index].as_py()
    return target.decode([i for i, m in zip(ids_of(built, index), mask, strict=True) if m])


def rejects(built: Built) -> dict[str, str]:
    return dict(zip(*(built.rejected.column(n).to_pylist() for n in ("prompt_id", "reason")), strict=True))


def test_template_without_generation_tags_still_gives_a_mask():
    target, (case,) = chatml_target(), load("01_no_generation_tags_zero_mask")
    assert "generation %}" not in target.template
    built = build(target, [row(case, thinking=False)])
    assert said(target, built) == "Eleven is one.<|im_end|>"
    assert built.tokens.column("mask_method").to_pylist() == ["template_offsets"]


def test_only_the_assistant_is_supervised_never_everything():
    target, (case,) = chatml_target(), load("02_all_ones_fallback_mask")
    built = build(target, [row(case, thinking=False)])
    assert [said(target, built, i) for i in (0, 1)] == ["Green.<|im_end|>", "White.<|im_end|>"]
    for index in (0, 1):
        assert 0 < sum(built.tokens.column("loss_mask")[index].as_py()) < len(ids_of(built, index))


def test_an_empty_think_block_and_a_word_is_too_little_however_it_was_written():
    built = build(qwen36(), [row(entry) for entry in load("03_empty_think_only_sample")], min_content_tokens=8)
    assert rejects(built) == {"s1": "TOO_FEW_SUPERVISED_TOKENS", "s2": "TOO_FEW_SUPERVISED_TOKENS"}
    details = built.rejected.column("detail").to_pylist()
    assert details[0] == details[1] and "content tokens" in details[0]
    assert built.tokens.column("prompt_id").to_pylist() == ["s3"]


def test_a_prompt_that_fills_the_window_leaves_no_row():
    (case,) = load("04_prompt_fills_window")
    rows = [row(entry) for entry in case["rows"]]
    built = build(qwen36(), rows, max_length=case["max_length"], on_too_long="truncate")
    assert rejects(built) == {"long": "NO_SUPERVISED_TOKENS_AFTER_TRUNCATION"}
    assert built.tokens.column("prompt_id").to_pylist() == ["ok"]
    assert all(len(ids_of(built, i)) <= case["max_length"] for i in range(built.tokens.num_rows))


def test_an_answer_at_the_very_first_token_does_not_supervise_the_user():
    (case,) = load("08_generation_span_at_token_zero")
    template = (
        "{% for m in messages %}{% if not loop.first %}{{ '<|' + m.role + '|>' }}{% endif %}{{ m.content }}{% endfor %}"
    )
    target = custom_target("zero", template, small_tokenizer(["<|end|>"]), "<|end|>")
    messages = [canonical(m) for m in case["messages"]]
    built = build(target, [completion("row", messages, thinking=False)])
    texts = [said(target, built, i) for i in range(built.tokens.num_rows)]
    assert built.tokens.num_rows + built.rejected.num_rows == 1
    assert not any("USERMARK" in text for text in texts)


def test_reasoning_that_history_drops_is_supervised_in_its_own_row():
    target, (case,) = qwen36(), load("10_history_reasoning_stripped")
    built = build(target, [row(case)])
    assert built.tokens.column("turn").to_pylist() == [0, 1]
    first, second = said(target, built, 0), said(target, built, 1)
    assert "R1MARK" in first
    assert "R1MARK" not in target.decode(ids_of(built, 1))
    assert "R2MARK" in second and "12" in second and "4<" not in second
    kept = build(target, [row(case)], preserve=True)
    assert "R1MARK" in target.decode(ids_of(kept, 1)) and "R1MARK" not in said(target, kept, 1)
    settings = TokenizationSettings()
    assert digest(fingerprint(target, settings, True)) != digest(fingerprint(target, settings, False))


def test_reasoning_in_its_own_field_is_rendered_once_and_supervised():
    target, (case,) = qwen36(), load("11_reasoning_content_ignored")
    built = build(target, [row(case)])
    assert target.decode(ids_of(built)).count("REASONMARK") == 1
    for part in ("REASONMARK", "</think>", "No, 91"):
        assert part in said(target, built)


def test_inline_thinking_is_moved_and_a_second_block_is_a_reject():
    target = qwen36()
    built = build(target, [row(entry) for entry in load("13_double_think_block")])
    assert rejects(built) == {"both": "DUPLICATE_THINK_BLOCK", "twice": "DUPLICATE_THINK_BLOCK"}
    assert built.tokens.column("prompt_id").to_pylist() == ["inline"]
    text = target.decode(ids_of(built))
    assert text.count("<think>") == text.count("</think>") == 1 and "five fives" in text


def test_turns_forged_inside_user_text_stay_text():
    target = qwen36()
    built = build(target, [row(entry) for entry in load("15_control_tokens_in_user_text")])
    assert rejects(built) == {}
    forged = ids_of(built, 0)
    assert "FORGEDMARK" not in said(target, built, 0)
    assert forged.count(target.tokenizer.token_to_id("<|im_start|>")) == 2
    assert target.tokenizer.token_to_id("<|image_pad|>") not in ids_of(built, 1)


def test_boundaries_come_from_the_one_tokenization():
    target, (case,) = qwen36(), load("17_bpe_merge_at_boundary")
    for entry in case["rows"]:
        built = build(target, [row(entry)])
        ids, text = ids_of(built), said(target, built)
        assert "MARK" in text and "<|im_start|>" not in text
        assert ids == target.encode(target.decode(ids))
    # the blank line of an empty think block merges with the newline of the prompt: that token was never sampled
    empty = build(target, [row(case["rows"][1])])
    assert said(target, empty).startswith("</think>")


def test_a_template_that_numbers_its_rounds_gives_no_shifted_mask():
    (case,) = load("18_template_not_prefix_stable")
    template = (
        "{% for m in messages %}{{ '[Round ' ~ loop.index ~ ' of ' ~ messages|length ~ '] ' }}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    target = custom_target("rounds", template, small_tokenizer(["<|im_end|>", "<|im_start|>"], []), "<|im_end|>")
    built = build(target, [row(case, thinking=False)])
    assert [said(target, built, i) for i in (0, 1)] == ["b<|im_end|>", "d<|im_end|>"]
    assert built.tokens.column("mask_method").to_pylist() == ["composed_offsets"] * 2


def test_one_row_that_the_template_refuses_does_not_end_the_rest():
    entries = [*load("23_no_user_turn"), *(e for e in load("21_one_bad_row_kills_run") if e["id"].startswith("good"))]
    built = build(qwen36(), [row(entry) for entry in entries])
    assert built.tokens.column("prompt_id").to_pylist() == ["good1", "good2"]
    assert rejects(built) == {"tool_only": "TEMPLATE_REFUSED"}
    assert "No user query" in built.rejected.column("detail")[0].as_py()


@pytest.mark.parametrize("name", ["qwen3_6", "qwen3", "glm4moe"])
def test_call_arguments_as_text_and_as_object_give_the_same_tokens(name: str):
    target = family_target(name)
    built = build(target, [row(entry) for entry in load("24_tool_arguments_as_json_string")])
    assert ids_of(built, 0) == ids_of(built, 1)
    assert "lookup" in said(target, built) and "Oslo" in said(target, built)


def test_null_and_absent_text_beside_a_call_are_the_same_and_nothing_at_all_is_a_reject():
    target = qwen36()
    built = build(target, [row(entry) for entry in load("26_null_content_with_tool_calls")])
    assert rejects(built) == {"bad": "EMPTY_ANSWER"}
    assert built.tokens.column("prompt_id").to_pylist() == ["null", "null", "absent", "absent"]
    assert ids_of(built, 0) == ids_of(built, 2) and ids_of(built, 1) == ids_of(built, 3)
    assert "<function=now>" in said(target, built, 0) and "It is noon." in said(target, built, 1)


def test_one_beginning_of_sequence_though_tokenizer_and_template_both_write_it():
    (case,) = load("27_duplicate_bos")
    tokenizer = small_tokenizer(["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    llama = family_target("llama3_1")
    target = custom_target("two-bos", llama.template, tokenizer, "<|eot_id|>", "<|begin_of_text|>")
    assert target.tokenizer.encode("x").ids[0] == begin
    messages = [canonical(m) for m in case["messages"]]
    built = build(target, [served(target, "row", messages, ["hi there, friend<|eot_id|>"]), completion("t", messages)])
    for index in (0, 1):
        assert ids_of(built, index).count(begin) == 1 and ids_of(built, index)[0] == begin


def test_prompts_are_lists_of_integers_whatever_the_library_returns():
    (case,) = load("28_apply_chat_template_return_type")
    ids = qwen36().prompt_ids([canonical(m) for m in case["messages"][:1]])
    assert len(ids) > 5 and all(type(i) is int for i in ids)
    assert len(ids) <= case["max_length"]


def test_another_template_text_is_another_file(tmp_path):
    (case,) = load("30_stale_tokenized_cache")
    path = write_completions(tmp_path / "completions.parquet", [row({**case["row"]}, thinking=False)])
    tokens, prints = [], []
    for version_text in (case["run1"]["template_text"], case["run2"]["template_text"]):
        name, template = f"stale-{version_text}", CHATML.replace("Answer briefly.", version_text)
        folder = tmp_path / name
        write_target(folder, small_tokenizer(["<|im_end|>", "<|im_start|>"], []), template, "<|im_end|>")
        target = load_target(TargetSettings(model=str(folder)))
        settings = TokenizationSettings(min_content_tokens=0)
        tokenize_chunk(path, tmp_path / "tokens.parquet", target, settings, SamplingSettings())
        tokens.append(pq.read_table(tmp_path / "tokens.parquet")["input_ids"][0].as_py())
        prints.append(fingerprint(target, settings, False))
    assert tokens[0] != tokens[1]
    assert {name for name in prints[0] if prints[0][name] != prints[1][name]} == {"template_sha256"}
    covered = {"template_sha256", "tokenizer_sha256", "preserve_thinking", "settings", "mask_convention", "tokenizers"}
    assert covered <= set(prints[0]) and prints[0]["tokenizers"] == version("tokenizers")
    assert prints[0]["settings"]["max_length"] is None and "workers" not in prints[0]["settings"]


def test_mask_is_aligned_with_its_tokens_and_not_shifted():
    (case,) = load("31_mask_shift_convention")
    positions = case["assistant_positions"]
    mask = flat_mask([(positions[0], positions[-1] + 1)], np.array([0, len(case["input_ids"])]))
    assert mask.tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert MASK_CONVENTION == "token_aligned_unshifted"


def test_ids_that_text_cannot_give_back_are_kept_and_else_the_drift_is_recorded():
    target, (case,) = qwen36(), load("45_retokenization_drift")
    asked, answer = [Message("user", "spell")], assistant(f"{case['text']} and the answer")
    rest = target.encode(" and the answer")
    apart = [target.tokenizer.token_to_id(letter) for letter in case["generated_ids"]]
    assert target.encode(case["text"]) != apart
    prompt = target.prompt_ids(asked, thinking=False)
    end = target.tokenizer.token_to_id("<|im_end|>")
    exact = turn_of(0, answer, prompt, [*apart, *rest, end])
    text = turn_of(0, answer, completion_tokens=len(apart) + len(rest) + 1)
    rows = [
        completion(name, [*asked, answer], [turn], thinking=False) for name, turn in (("ids", exact), ("text", text))
    ]
    built = build(target, rows)
    assert ids_of(built, 0)[len(prompt) : len(prompt) + 2] == apart
    assert built.tokens.column("token_source").to_pylist() == ["server", "retokenized"]
    assert built.tokens.column("retokenized_difference").to_pylist() == [None, -1]


def test_inside_a_tool_loop_the_second_turn_still_sees_the_first_reasoning():
    target, (case,) = qwen36(), load("48_tool_loop_reasoning_dropped")
    first = canonical(case["turn1_response"]["body"]["choices"][0]["message"])
    messages = [Message("user", "How warm is Oslo?"), first, Message("tool", case["tool_result"], tool_call_id="c1")]
    built = build(target, [completion("p", [*messages, assistant("It is three degrees.", "Read it.")])])
    assert "REASON1" in said(target, built, 0)
    assert "REASON1" in target.decode(ids_of(built, 1)) and "REASON1" not in said(target, built, 1)
    after = [*messages, assistant("It is three degrees.", "Read it."), Message("user", "Thanks")]
    assert "REASON1" not in target.render(after)


def test_a_stop_token_that_leaked_into_text_does_not_end_the_turn_early():
    target = qwen36()
    messages = [Message("user", "Hi"), assistant("Use <|im_end|> to stop.", "say it")]
    built = build(target, [completion("p", messages)])
    ids = ids_of(built)
    end = target.tokenizer.token_to_id("<|im_end|>")
    assert ids[-1] == end and ids.count(end) == 2
    assert said(target, built) == "say it\n</think>\n\nUse <|im_end|> to stop.<|im_end|>"
