"""Public faults of input data (schema, encoding, roles, columns, identity), each as the outcome it should have had."""

import json
from pathlib import Path
from typing import Any

import datasets
import orjson
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paths import shared
from targets import qwen36
from tasks.target.text import TargetText
from tasks.validation import merge
from tasks.validation.policy import make_policy
from tasks.validation.reasons import Reason, RowError
from tasks.validation.run import validate
from tasks.validation.settings import SourceSettings


@pytest.fixture(scope="module")
def target() -> TargetText:
    return qwen36()


class Ends:
    """How the rows of a set ended, by the id that each brought along."""

    def __init__(self, out: Path, sources: tuple[Path, ...], target: Any = None, **options: Any) -> None:
        training = options.pop("for_training", False)
        settings = SourceSettings(paths=tuple(map(str, sources)), gate="monitor", **options)
        self.result = validate(settings, target, out, for_training=training)
        rejected = pl.read_parquet(self.result.rejected_path)
        self.reasons = {row["id"]: row["reason"] for row in rejected.to_dicts()}
        self.prompts = pl.read_parquet(self.result.prompts_path).sort("source", "row")
        assert self.result.rows == self.result.kept + self.result.rejected + self.result.duplicates

    @property
    def turns(self) -> list[list[dict[str, Any]]]:
        return self.prompts["messages"].to_list()


def case(folder: str) -> Path:
    return shared(f"cases/{folder}/input.jsonl")


def rows_file(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def test_an_empty_think_block_and_ok_teach_nothing_however_they_are_written(tmp_path, target):
    ends = Ends(tmp_path, (case("03_empty_think_only_sample"),), target, for_training=True)
    assert ends.reasons == {"s1": "TOO_FEW_SUPERVISED_TOKENS", "s2": "TOO_FEW_SUPERVISED_TOKENS"}
    assert ends.result.kept == 1
    details = pl.read_parquet(ends.result.rejected_path)["detail"]
    assert all("2 content tokens, the floor is 8" in detail for detail in details)
    regenerate = Ends(tmp_path, (case("03_empty_think_only_sample"),), target)
    assert dict(regenerate.result.regenerate_reasons) == {"TOO_FEW_SUPERVISED_TOKENS": 1}
    assert (regenerate.result.kept, regenerate.result.duplicates) == (2, 1)


def test_masks_that_do_not_fit_their_ids_are_never_padded_or_cut(tmp_path, target):
    ends = Ends(tmp_path, (case("07_mask_length_skew"),), target, for_training=True, min_content_tokens=1)
    assert ends.reasons == {
        "short_mask": "LENGTH_MISMATCH",
        "long_mask": "LENGTH_MISMATCH",
        "nonbinary": "MASK_NOT_BINARY",
    }
    assert ends.result.kept == 1


def test_a_conversation_that_opens_with_the_assistant_is_refused():
    row = json.loads(shared("cases/08_generation_span_at_token_zero/input.json").read_text())
    with pytest.raises(RowError) as caught:
        make_policy(SourceSettings(paths=("x",)), None).keep({"messages": row["messages"]})
    assert caught.value.reason is Reason.STARTS_WITH_ASSISTANT


def test_thinking_inline_and_in_its_field_is_one_block_and_two_blocks_are_a_reject(tmp_path, target):
    source = case("13_double_think_block")
    ends = Ends(tmp_path, (source,), target, for_training=True, min_content_tokens=2)
    assert ends.reasons == {"both": "DUPLICATE", "twice": "DUPLICATE_THINK_BLOCK"}
    assert [turn["reasoning_content"] for turn in ends.turns[0]] == [None, "five fives"]
    assert ends.turns[0][1]["content"] == "25"


def test_forged_turns_and_placeholders_in_user_text_are_refused_or_stay_text(tmp_path, target):
    source = case("15_control_tokens_in_user_text")
    ends = Ends(tmp_path, (source,), target)
    assert set(ends.reasons.values()) == {"CONTROL_TOKEN_IN_CONTENT"} and len(ends.reasons) == 2
    kept = Ends(tmp_path, (source,), target, control_tokens="encode")
    assert kept.result.kept == 2 and "FORGEDMARK" in kept.turns[0][0]["content"]


def test_role_names_of_two_schools_are_the_same_row(tmp_path):
    ends = Ends(tmp_path, (case("19_sharegpt_role_names"),))
    assert ends.reasons == {"oa": "DUPLICATE"} and [t["role"] for t in ends.turns[0]] == ["user"]


def test_rows_in_a_wrong_order_do_not_end_the_run(tmp_path, target):
    ends = Ends(tmp_path, (case("21_one_bad_row_kills_run"),), target, for_training=True, min_content_tokens=1)
    assert ends.reasons == {"starts_asst": "STARTS_WITH_ASSISTANT", "two_users": "BAD_ROLE_ORDER"}
    assert [turns[1]["content"] for turns in ends.turns] == ["a fine answer", "another fine answer"]


def test_a_last_user_turn_is_a_prompt_to_answer_and_no_row_to_train_on(tmp_path):
    row = json.loads(shared("cases/22_ends_with_user/input.json").read_text())["row"]
    source = rows_file(tmp_path / "rows.jsonl", [row])
    assert Ends(tmp_path / "a", (source,)).result.kept == 1
    assert Ends(tmp_path / "b", (source,), for_training=True).reasons == {"u": "MUST_END_WITH_ASSISTANT"}


def test_a_conversation_without_a_user_is_refused_before_anything_is_sent(tmp_path):
    assert Ends(tmp_path, (case("23_no_user_turn"),)).reasons == {"tool_only": "NO_USER_TURN"}


def test_call_arguments_have_one_stored_form(tmp_path):
    ends = Ends(tmp_path, (case("24_tool_arguments_as_json_string"),), for_training=True, min_content_tokens=1)
    assert ends.reasons == {"dict": "DUPLICATE"}
    call = json.loads(ends.turns[0][1]["tool_calls"])[0]
    assert call["function"]["name"] == "lookup" and json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


def test_null_and_absent_text_beside_a_call_are_the_same_prompt(tmp_path):
    ends = Ends(tmp_path, (case("26_null_content_with_tool_calls"),), for_training=True, min_content_tokens=1)
    assert ends.reasons == {"absent": "DUPLICATE", "bad": "EMPTY_ASSISTANT"}
    assert [t["content"] for t in ends.turns[0]] == ["time?", "", "12:00", "It is noon."]


def test_a_torn_last_line_is_told_apart_and_costs_only_itself(tmp_path):
    ends = Ends(tmp_path, (case("54_torn_last_line"),))
    assert dict(ends.result.reasons) == {"NO_CONVERSATION": 1, "TORN_LINE": 1}


def test_a_mark_at_the_start_of_the_file_changes_nothing(tmp_path):
    source, bare = case("56_utf8_bom"), tmp_path / "bare.jsonl"
    bare.write_bytes(source.read_bytes().removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n"))
    with_mark, without = Ends(tmp_path / "a", (source,)), Ends(tmp_path / "b", (bare,))
    assert with_mark.prompts.drop("source").equals(without.prompts.drop("source")) and with_mark.result.kept == 2


def test_equal_ids_with_other_content_are_other_rows(tmp_path):
    ends = Ends(tmp_path, (case("58_duplicate_ids"),))
    assert (ends.result.rows, ends.result.kept, ends.result.duplicates) == (3, 2, 1)
    assert [t[0]["content"] for t in ends.turns] == ["first question", "second question"]
    assert pl.read_parquet(ends.result.rejected_path)["row"].to_list() == [2]


def test_files_of_all_nulls_and_of_text_have_one_schema(tmp_path):
    shards = json.loads(shared("cases/62_null_first_then_string/input.json").read_text())["shards"]
    schemas = []
    for index, shard in enumerate(shards):
        rows = [{"id": row["id"], "system": row["system"], "prompt": f"question {row['id']}"} for row in shard]
        path = tmp_path / f"{index}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        ends = Ends(tmp_path / str(index), (path,))
        schemas.append(pq.read_schema(ends.result.prompts_path))
        assert ends.turns[0][0]["role"] == ("user", "system")[index]
    assert schemas[0].equals(schemas[1])
    assert not any(pa.types.is_null(field.type) for field in schemas[0])
    both = Ends(tmp_path / "both", (tmp_path / "1.parquet", tmp_path / "0.parquet"))
    assert both.result.kept == 2


def test_arguments_as_object_and_as_text_live_in_one_text_column(tmp_path):
    ends = Ends(tmp_path, (case("64_arguments_object_or_string"),), for_training=True, min_content_tokens=1)
    calls = [json.loads(turns[1]["tool_calls"])[0]["function"]["arguments"] for turns in ends.turns]
    assert [json.loads(text) for text in calls] == [{"q": 1}, {"q": "a"}]
    assert len(datasets.Dataset.from_parquet(ends.result.prompts_path, cache_dir=str(tmp_path))) == 2


def test_arguments_keep_exactly_their_own_keys(tmp_path):
    source = tmp_path / "rows.jsonl"
    genuine = (
        b'{"id": "3", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"id": "1",'
    )
    genuine += b' "function": {"name": "f", "arguments": {"limit": null}}}]}]}\n'
    source.write_bytes(case("65_struct_union_null_padding").read_bytes() + genuine)
    ends = Ends(tmp_path, (source,), for_training=True, min_content_tokens=1)
    calls = [json.loads(turns[1]["tool_calls"])[0]["function"]["arguments"] for turns in ends.turns]
    assert [json.loads(text) for text in calls] == [{"city": "Oslo"}, {"path": "/x"}, {"limit": None}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_that_some_files_lack_survives_in_either_order(kind, tmp_path):
    files = json.loads(shared("cases/67_column_missing_in_some_files/input.json").read_text())["files"]
    paths = []
    for name, rows in files.items():
        path = tmp_path / name.replace("jsonl", kind)
        if kind == "jsonl":
            rows_file(path, rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
        paths.append(path)
    for index, order in enumerate((paths, paths[::-1])):
        ends = Ends(tmp_path / str(index), tuple(order))
        tools = {turns[0]["content"]: tools for turns, tools in zip(ends.turns, ends.prompts["tools"], strict=True)}
        assert tools == {"a": None, "b": '["t"]'}


def test_output_is_flushed_by_bytes_and_read_back_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "ROW_GROUP_BYTES", 1 << 20)
    monkeypatch.setattr("tasks.validation.run.PARTITION_BYTES", 256 << 10)
    rows = [{"prompt": f"{i} " + "x" * 1024} for i in range(3 << 10)]
    ends = Ends(tmp_path, (rows_file(tmp_path / "rows.jsonl", rows),))
    assert pq.read_metadata(ends.result.prompts_path).num_row_groups >= 3
    assert len(ends.prompts) == len(rows)
    content = pq.read_schema(ends.result.prompts_path).field("messages").type.value_type.field("content")
    assert content.type == pa.large_string()


def test_lists_of_any_width_are_read_and_one_type_is_written(tmp_path, target):
    info = json.loads(shared("cases/71_large_list_vs_list/input.json").read_text())
    kinds, paths = (pa.list_(pa.int32()), pa.large_list(pa.int64())), []
    for index, (kind, rows) in enumerate(zip(kinds, (info["rows_a"], info["rows_b"]), strict=True)):
        ids = pa.array([row["input_ids"] for row in rows], kind)
        paths.append(tmp_path / f"{index}.parquet")
        ones = pa.array([[1] * len(row["input_ids"]) for row in rows], kind)
        pq.write_table(pa.table({"input_ids": ids, "loss_mask": ones}), paths[-1])
    ends = Ends(tmp_path / "out", tuple(paths), target, for_training=True, min_content_tokens=1)
    assert (ends.result.rows, ends.result.kept) == (2, 2)
    shards = [Ends(tmp_path / f"p{i}", (rows_file(tmp_path / f"{i}.jsonl", [{"prompt": "ab"[i]}]),)) for i in (0, 1)]
    loaded = [datasets.Dataset.from_parquet(s.result.prompts_path, cache_dir=str(tmp_path / "c")) for s in shards]
    assert len(datasets.concatenate_datasets(loaded)) == 2


def test_a_line_of_megabytes_is_read_or_one_reject(tmp_path):
    rows = [{"id": "long", "prompt": "y" * (2 << 20)}, {"id": "short", "prompt": "z"}]
    source = rows_file(tmp_path / "rows.jsonl", rows)
    assert Ends(tmp_path / "a", (source,)).result.kept == 2
    limited = Ends(tmp_path / "b", (source,), max_line_bytes=1 << 20)
    assert limited.result.kept == 1 and dict(limited.result.reasons) == {"LINE_TOO_LONG": 1}


def test_a_value_that_is_no_json_costs_only_its_row(tmp_path):
    ends = Ends(tmp_path, (case("73_nan_in_json"),))
    assert dict(ends.result.reasons) == {"INVALID_JSON": 1} and ends.prompts["row"].to_list() == [0, 2]


def test_content_in_parts_becomes_text_and_pictures_are_refused(tmp_path):
    ends = Ends(tmp_path, (case("74_content_string_or_parts"),))
    assert ends.reasons == {"img": "UNSUPPORTED_CONTENT_PART"}
    assert [turns[0]["content"] for turns in ends.turns] == ["plain", "in parts"]


def test_everything_rejected_is_a_verdict_and_never_a_success(tmp_path):
    source = rows_file(tmp_path / "rows.jsonl", [{"messages": 3}] * 5)
    result = validate(SourceSettings(paths=(str(source),)), None, tmp_path / "out")
    assert result.report.verdict == "NOTHING_USABLE" and result.report.stops
    assert "BAD_MESSAGE 5" in result.report.summary


def test_the_incident_with_the_real_tokenizer(tmp_path, target):
    """87 of 100 samples are an empty think block and `OK.`: 6 supervised tokens, 4 of them scaffold."""
    ids, masks = [], []
    for index in range(100):
        head = target.encode(f"<|im_start|>user\nQuestion {index}?<|im_end|>\n<|im_start|>assistant\n<think>")
        answer = "OK." if index < 87 else "The answer has enough words for a drafter to learn something from it."
        said = target.encode(f"\n\n</think>\n\n{answer}<|im_end|>")
        ids.append(head + said)
        masks.append([0] * len(head) + [1] * len(said))
    path = tmp_path / "tokens.parquet"
    pq.write_table(pa.table({"input_ids": ids, "loss_mask": masks}), path)
    ends = Ends(tmp_path / "a", (path,), target, for_training=True)
    assert dict(ends.result.reasons) == {"TOO_FEW_SUPERVISED_TOKENS": 87} and ends.result.kept == 13
    assert ends.result.report.details["tokens"]["common_mask"] == {"supervised": 6, "scaffold": 4, "rows": 87}
    assert ends.result.report.details["tokens"]["example"]["text"] == "\n\n</think>\n\nOK.<|im_end|>"
    again = Ends(tmp_path / "b", (path,), target)
    assert again.result.kept == 100 and dict(again.result.regenerate_reasons) == {"TOO_FEW_SUPERVISED_TOKENS": 87}
    assert again.result.report.details["tokens"]["histogram"][4] == [6, 87, 87]
    assert "87 of them (87.0%) have a bad old response" in again.result.report.summary
    assert again.turns[3] == [{"role": "user", "content": "Question 3?", "reasoning_content": None,
                               "tool_calls": None, "tool_call_id": None, "name": None}]  # fmt: skip
