"""Whole sets: every format gives the same prompts, sums are proven by id, files fail with one clear error."""

import gzip
import json
from pathlib import Path
from typing import Any

import orjson
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tasks.errors import DatasetError, SpecError, VerificationError
from tasks.validation import run as running
from tasks.validation.reasons import Reason
from tasks.validation.schema import PROMPTS, REJECTED
from tasks.validation.sums import prove
from validation_rows import SmallTarget, chat

ROWS = [{"id": str(i), **chat(f"question number {i}", f"a long enough answer to number {i}")} for i in range(40)]
TOKENS = {"input_ids": [[5, 20 + i, 5, 30, 31 + i, 3] for i in range(9)], "loss_mask": [[0, 0, 0, 1, 1, 1]] * 9}


def lines(rows: list[Any]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def write(kind: str, folder: Path) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_bytes(lines(ROWS))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines(ROWS)))
    elif kind == "jsonl.zst":
        path.write_bytes(zstandard.compress(lines(ROWS[:20])) + zstandard.compress(lines(ROWS[20:])))
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "object.json":
        path.write_text(json.dumps({"data": ROWS}, indent=1))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    elif kind == "arrow":
        with pa.ipc.new_file(path, pa.Table.from_pylist(ROWS).schema) as writer:
            writer.write_table(pa.Table.from_pylist(ROWS), max_chunksize=7)
    elif kind == "folder":
        path.mkdir()
        (path / "a.jsonl").write_bytes(lines(ROWS[:10]))
        pq.write_table(pa.Table.from_pylist(ROWS[10:]), path / "b.parquet")
    else:
        import datasets

        found = datasets.Dataset.from_list(ROWS)
        (found if kind == "saved" else datasets.DatasetDict(train=found)).save_to_disk(path)
    return path


KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "json", "object.json", "parquet", "arrow", "folder", "saved", "saved-dict"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_prompts(kind: str, tmp_path: Path, judge: Any) -> None:
    found = judge(write(kind, tmp_path))
    assert found.sums == (40, 40, 0, 0)
    expected = judge(write("jsonl", tmp_path)).prompts if kind != "jsonl" else found.prompts
    assert found.prompts["prompt_id"].to_list() == sorted(expected["prompt_id"])
    assert found.prompts["messages"].to_list() == expected["messages"].to_list()
    names = {field.name for field in PROMPTS.field("messages").type.value_type}
    assert found.prompts["messages"][0].to_list()[0].keys() == names


def test_globs_and_several_sources_are_read_in_order(tmp_path: Path, judge: Any) -> None:
    for name, part in (("a1", ROWS[:5]), ("a2", ROWS[5:9]), ("b", ROWS[:5])):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(part))
    found = judge(tmp_path / "a*.jsonl", tmp_path / "b.jsonl")
    assert found.sums == (14, 9, 0, 5)
    assert set(found.rejected["source"]) == {str(tmp_path / "b.jsonl")}
    assert set(found.rejected["duplicate_of"]) <= set(found.prompts["prompt_id"])


def test_files_have_their_declared_schema_even_when_empty(tmp_path: Path, judge: Any, jsonl: Any) -> None:
    found = judge(jsonl([chat("q")]))
    assert pq.read_schema(found.result.prompts_path).equals(PROMPTS)
    assert pq.read_schema(found.result.rejected_path).equals(REJECTED)
    found = judge(jsonl([chat(" ")]))
    assert pq.read_schema(found.result.prompts_path).equals(PROMPTS)
    assert found.result.report.verdict == "NOTHING_USABLE" and found.result.report.stops


def test_worker_processes_and_many_partitions_change_nothing(
    tmp_path: Path, judge: Any, jsonl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat(f"q {i % 700}", "an answer of several words that is long enough") for i in range(1000)]
    source = jsonl([*rows, b"{", {"messages": 3}])
    alone = judge(source)
    monkeypatch.setattr(running, "SMALL_BYTES", 0)
    monkeypatch.setattr(running, "PARTITION_BYTES", 5000)
    monkeypatch.setattr("tasks.validation.merge.FAN_IN", 2)
    monkeypatch.setattr("tasks.validation.plan.BLOCK_BYTES", 7000)
    together = judge(source, workers=2)
    assert alone.sums == together.sums == (1002, 700, 2, 300)
    assert alone.prompts.equals(together.prompts)
    key = ["row", "reason", "duplicate_of"]
    assert alone.rejected.sort(key).equals(together.rejected.sort(key))


def test_the_first_of_equal_prompts_is_kept(judge: Any, jsonl: Any) -> None:
    found = judge(jsonl([chat("b"), chat("a"), chat("b", "x"), chat("a"), chat("b")]))
    assert sorted(found.prompts["row"]) == [0, 1] and sorted(found.reasons) == [2, 3, 4]
    assert set(found.reasons.values()) == {"DUPLICATE"}


def test_in_training_different_answers_are_different_rows(judge: Any, jsonl: Any) -> None:
    long = "an answer of several words that is long enough number "
    source = jsonl([chat("q", long + "one"), chat("q", long + "two"), chat("q", long + "one")])
    assert judge(source, for_training=True).sums == (3, 2, 0, 1)
    assert judge(source, for_training=True, duplicates="prompt").sums == (3, 1, 0, 2)
    assert judge(source).sums == (3, 1, 0, 2)


def test_samples_give_one_prompt_each_and_rows_are_counted_once(judge: Any, jsonl: Any) -> None:
    found = judge(jsonl([chat("a"), chat("b"), chat("a")]), samples=3)
    assert found.sums == (3, 2, 0, 1) and found.result.report.details["prompts"] == len(found.prompts) == 6
    assert sorted(found.prompts["sample_index"]) == [0, 0, 1, 1, 2, 2]


def test_ids_that_are_done_are_left_out(tmp_path: Path, judge: Any, jsonl: Any) -> None:
    source = jsonl([chat("a"), chat("b"), chat("c")])
    ids = judge(source).prompts["prompt_id"].to_list()
    assert judge(source, skip_ids={ids[0]}).sums == (3, 2, 0, 1)
    done = tmp_path / "done.parquet"
    pl.DataFrame({"prompt_id": ids}).write_parquet(done)
    found = judge(source, skip_ids=done)
    assert found.sums == (3, 0, 0, 3) and set(found.rejected["reason"]) == {Reason.ALREADY_DONE.value}
    assert found.result.report.verdict == "PASSED"


def test_the_limit_counts_rows_over_all_sources(tmp_path: Path, judge: Any) -> None:
    first, second = write("parquet", tmp_path), write("jsonl", tmp_path)
    assert judge(first, second, limit=3).sums[0] == 3
    assert judge(first, second, limit=45).sums == (45, 40, 0, 5)


def test_near_duplicates_and_contamination_are_reasons_that_are_switched_on(
    tmp_path: Path, judge: Any, jsonl: Any
) -> None:
    base = " ".join(f"word{i}" for i in range(60))
    question = "which of these thirteen words in a row belongs to the famous public benchmark question"
    rows = [chat(base), chat(base + " more"), chat("other words entirely"), chat(f"Well: {question.upper()}!?")]
    source = jsonl(rows)
    assert judge(source).sums == (4, 4, 0, 0)
    assert len(judge(source, near_duplicates=True, samples=2).prompts) == 6
    near = judge(source, near_duplicates=True)
    assert near.sums == (4, 3, 0, 1) and near.reasons[1] == "NEAR_DUPLICATE"
    assert near.rejected["duplicate_of"][0] in set(near.prompts["prompt_id"])
    benchmark = jsonl([{"turns": [question]}], "benchmark.jsonl")
    found = judge(source, decontaminate=(str(benchmark),))
    assert found.sums == (4, 3, 1, 0) and found.reasons == {3: "CONTAMINATED"}


def test_tokenized_rows_become_prompts_through_the_target(tmp_path: Path, judge: Any) -> None:
    path = tmp_path / "tokens.parquet"
    ids = [*TOKENS["input_ids"], [7, 7, 7], [5, 99, 5, 3]]
    pq.write_table(pa.table({"input_ids": ids, "loss_mask": [*TOKENS["loss_mask"], [0, 0, 1], [0, 0, 1, 1]]}), path)
    found = judge(path, target=SmallTarget(), min_content_tokens=2)
    assert found.sums == (11, 10, 1, 0) and found.reasons == {9: "DOES_NOT_DECODE"}
    assert dict(found.result.regenerate_reasons) == {"TOO_FEW_SUPERVISED_TOKENS": 1}
    assert found.prompts["messages"][0].to_list()[0]["role"] == "user"
    assert set(found.prompts["old_output_tokens"]) == {2, 3}
    with pytest.raises(SpecError, match="target"):
        judge(path)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved", "jsonl", "labels"])
def test_tokenized_sets_are_judged_for_training_in_every_format(kind: str, tmp_path: Path, judge: Any) -> None:
    columns = {"id": [f"r{i}" for i in range(9)], **TOKENS}
    if kind == "labels":
        columns["labels"] = [[-100] * 3 + row[3:] for row in columns["input_ids"]]
        del columns["loss_mask"]
    table, path = pa.table(columns), tmp_path / f"tokens.{kind}"
    if kind in ("parquet", "labels"):
        pq.write_table(table, path, row_group_size=4)
    elif kind == "jsonl":
        path.write_bytes(lines(table.to_pylist()))
    elif kind == "saved":
        import datasets

        datasets.Dataset(table).save_to_disk(path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    found = judge(path, target=SmallTarget(), for_training=True, min_content_tokens=3)
    assert found.sums == (9, 0, 9, 0)
    assert dict(found.result.reasons) == {"TOO_FEW_SUPERVISED_TOKENS": 9}
    assert found.rejected.sort("row")["id"].to_list() == columns["id"]
    found = judge(path, target=SmallTarget(), for_training=True, min_content_tokens=2)
    assert found.sums == (9, 9, 0, 0) and found.result.report.verdict == "PASSED"
    assert found.result.report.details["tokens"]["common_mask"] == {"supervised": 3, "scaffold": 1, "rows": 9}


def test_a_mixed_set_adds_up(tmp_path: Path, judge: Any, jsonl: Any) -> None:
    long = "an answer of several words that is long enough"
    tokens = tmp_path / "tokens.parquet"
    pq.write_table(pa.table(TOKENS), tokens)
    source = jsonl([chat("q", long), chat("q"), {"input_ids": [5, 9, 5, 8, 8, 3], "loss_mask": [0, 0, 0, 1, 1, 1]}])
    found = judge(tokens, source, target=SmallTarget(), for_training=True, min_content_tokens=2)
    assert found.sums == (12, 11, 1, 0)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.jsonl", b"", "is empty"),
        ("blank.jsonl", b" \n\n", "white space"),
        ("picture.jsonl", b"\x89PNG\r\n\x1a\n\0\0", "PNG"),
        ("soup.jsonl", bytes(range(256)) * 20, "binary"),
        ("wide.jsonl", '{"a": 1}\n'.encode("utf-16"), "UTF-16"),
        ("bad.parquet", b"PAR1 and then nothing", "cannot read"),
        ("bad.arrow", b"ARROW1\0\0 and then nothing", "cannot read"),
        ("torn.jsonl.gz", gzip.compress(lines(ROWS) * 500)[:900], "damaged"),
        ("zip.jsonl", b"PK\x03\x04abc", "zip"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_error(
    name: str, data: bytes, message: str, tmp_path: Path, judge: Any
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DatasetError, match=message) as caught:
        judge(tmp_path / name)
    assert name in str(caught.value) and not list(tmp_path.glob("out/.validation*"))


def test_wrong_paths_say_what_is_near(tmp_path: Path, judge: Any, jsonl: Any) -> None:
    jsonl([chat("q")], "prompts.jsonl")
    with pytest.raises(DatasetError, match=r"prompts\.jsonl"):
        judge(tmp_path / "prompt.jsonl")
    with pytest.raises(DatasetError, match="no folder"):
        judge(tmp_path / "nowhere" / "x.jsonl")
    with pytest.raises(DatasetError, match="hf://org/name"):
        judge("org/name")
    with pytest.raises(DatasetError, match="matches nothing"):
        judge(tmp_path / "*.parquet")
    (tmp_path / "hollow").mkdir()
    with pytest.raises(DatasetError, match="no data files"):
        judge(tmp_path / "hollow")


def test_wrong_columns_are_an_error_that_names_them(tmp_path: Path, judge: Any) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"input_ids": [["a"]], "loss_mask": [[1]]}), path)
    with pytest.raises(DatasetError, match="input_ids is list"):
        judge(path, for_training=True)
    pq.write_table(pa.table({"input_ids": [[1]], "text": ["x"]}), path)
    with pytest.raises(DatasetError, match="neither loss_mask nor labels"):
        judge(path, for_training=True)


def test_a_parquet_file_without_conversations_rejects_its_rows(tmp_path: Path, judge: Any) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "t.parquet")
    assert set(judge(tmp_path / "t.parquet").reasons.values()) == {"NO_CONVERSATION"}


def test_text_in_arrow_that_is_not_utf8_rejects_one_row(tmp_path: Path, judge: Any) -> None:
    raw = pa.array([b"fine", b"\xff\xfe", b"also fine"], pa.binary())
    text = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    table = pa.table({"prompt": text})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table)
    found = judge(tmp_path / "t.arrow")
    assert found.sums == (3, 2, 1, 0) and found.reasons == {1: "INVALID_UTF8"}


def test_nulls_that_a_column_store_adds_are_dropped_from_arguments(tmp_path: Path, judge: Any) -> None:
    def row(question: str, arguments: dict[str, str]) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        tool = {"role": "tool", "content": "ok", "tool_call_id": "1"}
        return {"messages": [*chat(question)["messages"], {"role": "assistant", "tool_calls": [call]}, tool]}

    table = pa.Table.from_pylist([row("a", {"city": "Oslo"}), row("b", {"path": "/x"})])
    pq.write_table(table, tmp_path / "t.parquet")
    found = judge(tmp_path / "t.parquet").prompts
    calls = [json.loads(turns[1]["tool_calls"])[0] for turns in found.sort("row")["messages"].to_list()]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Oslo"}, {"path": "/x"}]


def test_the_proof_notices_a_row_that_is_lost_or_doubled(tmp_path: Path, judge: Any, jsonl: Any) -> None:
    found = judge(jsonl([chat("a"), chat("b"), chat("a")]))
    paths = Path(found.result.prompts_path), tmp_path / "none.parquet", Path(found.result.rejected_path)
    prove(*paths, 3)
    with pytest.raises(VerificationError, match="4 rows"):
        prove(*paths, 4)
    pl.concat([found.rejected, found.rejected.with_columns(row=pl.lit(0, pl.Int64))]).write_parquet(paths[2])
    with pytest.raises(VerificationError, match="two places"):
        prove(*paths, 4)


def test_progress_reaches_the_end(judge: Any, jsonl: Any) -> None:
    seen: list[tuple[int, int]] = []
    judge(jsonl(ROWS), progress=lambda judged, total: seen.append((judged, total)))
    assert seen[-1][0] == seen[-1][1] > 0


def test_a_json_document_with_one_bad_row_keeps_the_others(tmp_path: Path, judge: Any) -> None:
    path = tmp_path / "rows.json"
    good = [json.dumps(chat(q)) for q in "abc"]
    path.write_text(f'[{good[0]},\n {{"score": NaN, "prompt": "x"}}, {good[1]}, {{"messages": "\\ud800"}},\n{good[2]}]')
    found = judge(path)
    assert found.sums == (5, 3, 2, 0)
    assert found.reasons == {1: "INVALID_JSON", 3: "LONE_SURROGATE"}
