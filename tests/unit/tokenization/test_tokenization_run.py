"""A chunk in, a tokens file out: schema, sums, reuse, processes, packing."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from completions import assistant, batch, completion, served, turn_of, without_ids, write_completions
from targets import family_target, qwen36
from tasks.errors import DatasetError
from tasks.records import Message
from tasks.settings import SamplingSettings
from tasks.tokenization.items import answer_positions
from tasks.tokenization.rows import RowBuilder
from tasks.tokenization.run import tokenize_chunk
from tasks.tokenization.schema import MASK_CONVENTION, TOKENS
from tasks.tokenization.settings import TokenizationSettings

ANSWER = "Because short waves scatter more in the air than long ones do, number {}."


def rows(target, count: int) -> list[dict]:
    made = []
    for n in range(count):
        messages = [Message("user", f"Why {n}?"), assistant(ANSWER.format(n), "Think.")]
        row = served(target, f"{n:032x}", messages, [f"Think.\n</think>\n\n{ANSWER.format(n)}<|im_end|>"])
        made.append(row if n % 2 else without_ids(row))
    return made


def test_file_has_the_schema_the_sums_and_the_convention(tmp_path):
    target = qwen36()
    made = [*rows(target, 6), completion("short", [Message("user", "x"), assistant("OK.")])]
    path = write_completions(tmp_path / "00042" / "completions.parquet", made)
    out = path.with_name("tokens.parquet")
    record = tokenize_chunk(path, out, target, TokenizationSettings(), SamplingSettings())
    table = pq.read_table(out)
    assert table.schema.equals(TOKENS, check_metadata=False)
    assert (record.index, record.rows, record.rejected, record.exact_rows) == (42, 6, 1, 3)
    assert record.reasons == {"TOO_FEW_SUPERVISED_TOKENS": 1}
    assert record.supervised_tokens == sum(table["n_supervised"].to_pylist())
    assert table["prompt_id"].to_pylist() == [row["prompt_id"] for row in made[:6]]
    rejected = pq.read_table(out.with_name("tokens_rejected.parquet")).to_pylist()
    assert [(r["prompt_id"], r["reason"]) for r in rejected] == [("short", "TOO_FEW_SUPERVISED_TOKENS")]
    metadata = pq.read_metadata(out).metadata
    assert metadata[b"regen.mask_convention"].decode() == MASK_CONVENTION
    assert record.details["mask_methods"] == {"server_ids": 3, "template_offsets": 3}
    assert not list(out.parent.glob(".*"))


def test_several_processes_write_the_same_bytes_of_data(tmp_path):
    target = qwen36()
    path = write_completions(tmp_path / "completions.parquet", rows(target, 600))
    one = tokenize_chunk(path, tmp_path / "one.parquet", target, TokenizationSettings(workers=1), SamplingSettings())
    two = tokenize_chunk(path, tmp_path / "two.parquet", target, TokenizationSettings(workers=2), SamplingSettings())
    assert (one.rows, two.rows) == (600, 600)
    assert pq.read_table(tmp_path / "one.parquet").equals(pq.read_table(tmp_path / "two.parquet"))
    assert pq.ParquetFile(tmp_path / "two.parquet").num_row_groups == 2


def test_a_file_is_reused_only_for_the_same_bytes_and_policies(tmp_path):
    target = qwen36()
    path, out = write_completions(tmp_path / "completions.parquet", rows(target, 3)), tmp_path / "tokens.parquet"
    first = tokenize_chunk(path, out, target, TokenizationSettings(), SamplingSettings())
    written = out.stat().st_mtime_ns
    assert tokenize_chunk(path, out, target, TokenizationSettings(workers=1), SamplingSettings()) == first
    assert out.stat().st_mtime_ns == written
    for changed in ({"min_content_tokens": 3}, {"mask": "answer_only"}, {"max_length": 500}):
        tokenize_chunk(path, out, target, TokenizationSettings(**changed), SamplingSettings())
        assert out.stat().st_mtime_ns != written
        written = out.stat().st_mtime_ns
    write_completions(path, rows(target, 4))
    assert tokenize_chunk(path, out, target, TokenizationSettings(), SamplingSettings()).rows == 4


def test_packing_keeps_whole_rows_and_their_masks(tmp_path):
    target = qwen36()
    path, out = write_completions(tmp_path / "completions.parquet", rows(target, 40)), tmp_path / "tokens.parquet"
    tokenize_chunk(path, out, target, TokenizationSettings(pack_to=128), SamplingSettings())
    rowwise = {row["prompt_id"]: row for row in pq.read_table(out).to_pylist()}
    packed = pq.read_table(tmp_path / "packed.parquet").to_pylist()
    assert sorted(name for pack in packed for name in pack["prompt_ids"]) == sorted(rowwise)
    for pack in packed:
        ends = np.cumsum(pack["lengths"])
        assert len(pack["input_ids"]) == len(pack["loss_mask"]) == ends[-1] <= 128
        for name, end, size in zip(pack["prompt_ids"], ends, pack["lengths"], strict=True):
            assert pack["input_ids"][end - size : end] == rowwise[name]["input_ids"]
            assert pack["loss_mask"][end - size : end] == rowwise[name]["loss_mask"]
    assert sum(len(p["input_ids"]) for p in packed) / (128 * len(packed)) > 0.6


def test_an_empty_chunk_and_unreadable_files(tmp_path):
    target = qwen36()
    path = write_completions(tmp_path / "completions.parquet", [])
    assert tokenize_chunk(path, tmp_path / "t.parquet", target, TokenizationSettings(), SamplingSettings()).rows == 0
    for broken in (tmp_path / "missing.parquet", tmp_path / "broken.parquet"):
        if "broken" in broken.name:
            broken.write_bytes(b"PAR1 not really")
        with pytest.raises(DatasetError, match="cannot read completions"):
            tokenize_chunk(broken, tmp_path / "x.parquet", target, TokenizationSettings(), SamplingSettings())


def test_answers_are_found_where_some_turns_were_not_asked_for():
    said = [Message("user", "a"), assistant("kept"), Message("user", "b"), assistant("new"), Message("user", "c")]
    assert answer_positions(said, ["new"]) == [3]
    assert answer_positions(said, ["kept", "new"]) == [1, 3]
    assert answer_positions(said, ["gone"]) == [None]


WORDS = st.lists(
    st.one_of(
        st.text(max_size=12), st.sampled_from(["\n\n", "<|im_start|>", "<|user|>", " the ", "你好", "é", "```\n"])
    ),
    min_size=1,
    max_size=6,
).map(lambda parts: "".join(parts).encode("utf-8", "ignore").decode())


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(["qwen3_6", "glm4moe", "deepseekv3", "llama3_1", "gptoss"]),
    asked=WORDS,
    said=WORDS,
    thought=WORDS,
)
def test_mask_fits_and_the_supervised_ids_say_what_the_target_said(name: str, asked: str, said: str, thought: str):
    target = family_target(name)
    thinks = bool(target.family.think_open)
    row = completion("p", [Message("user", f"x {asked}"), assistant(said, thought if thinks else None)])
    built = RowBuilder(target, TokenizationSettings(min_content_tokens=0), False).build(batch([row]))
    assert built.tokens.num_rows + built.rejected.num_rows == 1
    if not built.tokens.num_rows:
        known = {"EMPTY_ANSWER", "DUPLICATE_THINK_BLOCK", "TEMPLATE_REFUSED"}
        assert built.rejected.column("reason")[0].as_py() in known
        return
    ids, mask = (built.tokens.column(n)[0].as_py() for n in ("input_ids", "loss_mask"))
    assert len(ids) == len(mask)
    sampled = [i for i, m in zip(ids, mask, strict=True) if m]
    answer = target.parse_answer(sampled)
    assert answer.content.strip() == said.strip()
    assert answer.ends_with_eot
    if thinks and answer.reasoning_content is not None:
        assert answer.reasoning_content.strip() == thought.strip()
    prompt = target.split_conversation([i for i, m in zip(ids, mask, strict=True) if not m])
    assert [m.content.strip() for m in prompt if m.role == "user"] == [f"x {asked}".strip()]


@settings(max_examples=60, deadline=None)
@given(asked=WORDS, said=st.text(min_size=1, max_size=40), finish=st.sampled_from(["stop", "length"]))
def test_rows_from_ids_decode_to_what_was_sampled(asked: str, said: str, finish: str):
    target = qwen36()
    said = said.encode("utf-8", "ignore").decode() or "x"
    messages = [Message("user", f"x {asked}"), assistant(said, "t")]
    sampled = [*target.encode("t\n</think>\n\n"), *target.guarded.encode(said, add_special_tokens=False).ids]
    prompt = target.prompt_ids(messages[:1])
    row = completion("p", messages, [turn_of(0, messages[1], prompt, sampled, finish)])
    built = RowBuilder(target, TokenizationSettings(min_content_tokens=0), False).build(batch([row]))
    ids, mask = (built.tokens.column(n)[0].as_py() for n in ("input_ids", "loss_mask"))
    end = [248046] if finish == "stop" else []
    assert ids == prompt + sampled + end
    assert mask == [0] * len(prompt) + [1] * (len(sampled) + len(end))
