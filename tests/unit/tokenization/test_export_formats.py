"""Exports: exact fields, shards, refusals, and how many rows each trainer will drop."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from completions import assistant, completion, served, write_completions
from flows.cli import run
from flows.commands.export import TRAINERS as NAMES
from targets import qwen36
from tasks.errors import DatasetError, SpecError
from tasks.records import Message
from tasks.settings import SamplingSettings
from tasks.tokenization.export import filters
from tasks.tokenization.export.formats import TRAINERS
from tasks.tokenization.export.run import RECORD, export
from tasks.tokenization.run import tokenize_chunk
from tasks.tokenization.schema import IDS, MASK
from tasks.tokenization.settings import TokenizationSettings

CALLS = '[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]'
TOOLS = '[{"type": "function", "function": {"name": "f", "parameters": {}}}]'


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    """A run of two chunks: single turns with ids, a conversation of two turns, a tool loop, a short answer."""
    target, root = qwen36(), tmp_path_factory.mktemp("export") / "run"
    long = "Because short waves scatter more in the air than the long ones do, so it looks blue from below."
    first = [
        served(
            target,
            f"{n:032x}",
            [Message("user", f"Why {n}?"), assistant(long, "T1")],
            [f"T1\n</think>\n\n{long}<|im_end|>"],
        )
        for n in range(5)
    ]
    talk = [Message("user", "a"), assistant(long, "FIRST"), Message("user", "b"), assistant(f"{long} Yes.", "SECOND")]
    loop = [
        Message("user", "a"),
        assistant("", "LOOK", CALLS),
        Message("tool", "r", tool_call_id="c1"),
        assistant(long, "R"),
    ]
    second = [
        completion("talk", talk),
        completion("loop", loop, tools=TOOLS),
        completion("short", [Message("user", "x"), assistant("Yes.")]),
    ]
    for index, rows in enumerate((first, second)):
        path = write_completions(root / "chunks" / f"{index:05d}" / "completions.parquet", rows)
        settings = TokenizationSettings(min_content_tokens=1)
        tokenize_chunk(path, path.with_name("tokens.parquet"), target, settings, SamplingSettings())
    return root


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def test_command_line_knows_every_trainer():
    assert set(NAMES) == set(TRAINERS)


def test_pretokenized_rows_have_two_fields_and_shards(run_folder, tmp_path):
    result = export(run_folder, "specforge", tmp_path / "out", shard_rows=4)
    rows = lines(tmp_path / "out")
    assert (result.rows, result.files) == (10, 3) == (len(rows), len(list((tmp_path / "out").glob("*.jsonl"))))
    assert all(set(row) == {"input_ids", "loss_mask"} for row in rows)
    tokens = [row for n in (0, 1) for row in pq.read_table(run_folder / f"chunks/{n:05d}/tokens.parquet").to_pylist()]
    assert [(r["input_ids"], r["loss_mask"]) for r in rows] == [(t["input_ids"], t["loss_mask"]) for t in tokens]


def test_speculators_rows(run_folder, tmp_path):
    export(run_folder, "speculators", tmp_path / "out")
    rows = lines(tmp_path / "out")
    assert set(rows[0]) == {"id", "primary_id", "input_ids", "loss_mask", "text", "metadata"}
    wanted = {"idx", "finish_reason", "is_tool_call", "usage", "endpoint", "sampling_params"}
    assert set(rows[0]["metadata"]) == wanted and rows[0]["metadata"]["sampling_params"]["top_k"] == 20
    assert [row["id"] for row in rows][-5:] == ["talk_gen0", "talk_gen1", "loop_gen0", "loop_gen1", "short_gen0"]
    assert [row["metadata"]["is_tool_call"] for row in rows][-5:] == [False, False, True, False, False]
    assert all(r["metadata"]["usage"]["completion_tokens"] == sum(r["loss_mask"]) for r in rows)
    assert "SECOND" in rows[6]["text"] and len({row["id"] for row in rows}) == 10


def test_prepared_folder(run_folder, tmp_path):
    from datasets import load_from_disk

    result = export(run_folder, "speculators-prepared", tmp_path / "out", shard_rows=5)
    data = load_from_disk(str(tmp_path / "out"))
    assert result.rows == len(data) == 10 and result.files == 2
    assert {name: str(feature) for name, feature in data.features.items()} == {
        "input_ids": "List(Value('int64'))",
        "loss_mask": "List(Value('int64'))",
        "seq_len": "Value('int64')",
    }
    assert data["seq_len"][0] == len(data["input_ids"][0])
    assert not list(tmp_path.glob(".*"))


def test_raw_conversations_are_one_row_a_turn_with_no_other_column(run_folder, tmp_path):
    export(run_folder, "specforge-raw", tmp_path / "out")
    rows = lines(tmp_path / "out")
    assert all(set(row) == {"id", "conversations", "tools"} for row in rows) and len(rows) == 10
    talk = [row for row in rows if row["id"].startswith("talk")]
    assert [len(row["conversations"]) for row in talk] == [2, 4]
    assert talk[1]["conversations"][1]["reasoning_content"] == "FIRST"
    loop = next(row for row in rows if row["id"] == "loop_1")
    assert json.loads(loop["tools"])[0]["function"]["name"] == "f" and "tool_calls" in loop["conversations"][1]


@pytest.mark.parametrize("trainer", ["torchspec", "deepspec", "angelslim"])
def test_content_only_trainers_get_the_thinking_inside_the_content(run_folder, tmp_path, trainer):
    result = export(run_folder, trainer, tmp_path / "out", block=16)
    rows = lines(tmp_path / "out")
    assert [row["id"] for row in rows][-3:] == ["talk", "loop", "short"] and set(rows[0]) == {"id", "conversations"}
    assert rows[0]["conversations"][1]["content"].startswith("<think>\nT1\n</think>\n\nBecause")
    assert set(rows[0]["conversations"][1]) == {"role", "content"}
    assert result.dropped_by_trainer >= 1
    assert ("14" in result.filter) is (trainer == "deepspec")


def test_messages_for_model_optimizer_and_automodel(run_folder, tmp_path):
    export(run_folder, "model-optimizer", tmp_path / "mo")
    rows = lines(tmp_path / "mo")
    assert set(rows[0]) == {"messages", "conversation_id"}
    assert rows[0]["messages"][1]["reasoning_content"] == "T1" and "tool_calls" not in rows[0]["messages"][0]
    assert rows[6]["messages"][1]["tool_calls"][0]["function"]["name"] == "f"
    result = export(run_folder, "automodel", tmp_path / "am", shard_rows=5)
    files = sorted(p.name for p in (tmp_path / "am").glob("*.parquet"))
    assert files == ["shard-000000.parquet", "shard-000001.parquet"] and result.dropped_by_trainer == 0
    assert pq.read_schema(tmp_path / "am" / files[0]).names == ["messages"]


def test_an_export_never_mixes_and_names_what_is_missing(run_folder, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(SpecError, match="not empty"):
        export(run_folder, "specforge", tmp_path)
    with pytest.raises(SpecError, match="unknown trainer"):
        export(run_folder, "other", tmp_path / "out")
    with pytest.raises(DatasetError, match="does not exist"):
        export(tmp_path / "gone", "specforge", tmp_path / "out")
    with pytest.raises(DatasetError, match="no token file"):
        export(tmp_path, "specforge", tmp_path / "out")
    alone = tmp_path / "alone" / "tokens.parquet"
    alone.parent.mkdir()
    alone.write_bytes((run_folder / "chunks/00000/tokens.parquet").read_bytes())
    assert export(alone, "specforge", tmp_path / "a").rows == 5
    with pytest.raises(DatasetError, match=r"completions\.parquet"):
        export(alone, "automodel", tmp_path / "b")


def test_a_published_set_exports_its_newest_snapshot_only(run_folder, tmp_path):
    current = {"files": {"tokens": ["chunks/00001/tokens.parquet"]}}
    copy = tmp_path / "set"
    for name in ("00000", "00001"):
        (copy / "chunks" / name).mkdir(parents=True)
        for file in ("tokens.parquet", "completions.parquet"):
            (copy / "chunks" / name / file).write_bytes((run_folder / "chunks" / name / file).read_bytes())
    (copy / "manifest.json").write_text(json.dumps({"current": current}))
    assert export(copy, "specforge", tmp_path / "out").rows == 5
    (copy / "manifest.json").write_text("[]")
    with pytest.raises(DatasetError, match="manifest"):
        export(copy, "specforge", tmp_path / "other")


def test_a_work_folder_with_its_published_copy_gives_each_row_once(run_folder, tmp_path):
    work = tmp_path / "work"
    for place in ("demo/runs/r1", "published/runs/r1"):
        shutil.copytree(run_folder, work / place)
    files = {"tokens": [f"runs/r1/chunks/0000{n}/tokens.parquet" for n in (0, 1)]}
    (work / "published/manifest.json").write_text(json.dumps({"current": {"files": files}}))
    assert export(work, "specforge", tmp_path / "out").rows == export(run_folder, "specforge", tmp_path / "run").rows
    shutil.copytree(work / "published", work / "other")
    with pytest.raises(DatasetError, match="2 published data sets"):
        export(work, "specforge", tmp_path / "both")


def test_rows_that_are_there_twice_are_refused_and_both_folders_named(run_folder, tmp_path, capsys):
    for place in ("a", "b"):
        shutil.copytree(run_folder, tmp_path / "work" / place)
    out = tmp_path / "out"
    assert run(["export", str(tmp_path / "work"), "--trainer", "specforge", "--out", str(out)]) == 2
    message = json.loads(capsys.readouterr().out.strip().split("\n")[-1])["error"]
    assert "10 answered turns" in message
    assert str(tmp_path / "work/a/chunks/00000") in message and str(tmp_path / "work/b/chunks/00000") in message
    assert not out.exists()


def test_what_the_trainer_drops_is_one_sentence(run_folder, tmp_path):
    result = export(run_folder, "speculators", tmp_path / "out")
    rule = "it drops rows with nothing supervised in the first 8,192 tokens"
    assert result.dropped_text == f"speculators 0.9.0 will drop none of them ({rule})"
    result = export(run_folder, "angelslim", tmp_path / "other", seq_length=50)
    assert result.dropped_text.startswith(f"angelslim will drop {result.dropped_by_trainer} of them (it drops rows")


def test_a_store_is_read_like_a_folder(run_folder, tmp_path):
    assert run(["export", f"file://{run_folder}", "--trainer", "automodel", "--out", str(tmp_path / "out")]) == 0
    assert sum(pq.read_metadata(p).num_rows for p in (tmp_path / "out").glob("*.parquet")) == 8


def test_reasoning_is_never_dropped_silently(run_folder, tmp_path):
    chunk = tmp_path / "chunk"
    chunk.mkdir()
    for file in ("tokens.parquet", "completions.parquet"):
        table = pq.read_table(run_folder / "chunks/00000" / file)
        pq.write_table(table.replace_schema_metadata(None), chunk / file)
    with pytest.raises(DatasetError, match="reasoning"):
        export(chunk, "deepspec", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_command_prints_one_last_line(run_folder, tmp_path, capsys):
    status = run(["export", str(run_folder), "--trainer", "specforge", "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    last = json.loads(said.out.splitlines()[-1])
    assert status == 0 and last["rows"] == 10 and last["mask_convention"] == "token_aligned_unshifted"
    assert "specforge 0.2.0 will drop none of them (it drops rows" in said.err
    assert json.loads((tmp_path / "out" / RECORD).read_text()) == last
    assert run(["export", str(tmp_path / "gone"), "--trainer", "specforge", "--out", str(tmp_path / "x")]) == 2


def test_filters_count_on_the_arrays_inside_the_window():
    masks = [[0, 0, 0], [0, 1, 0, 1], [0, 1, 1], [1], [0] * 20 + [1] * 40]
    offsets = np.concatenate(([0], np.cumsum([len(m) for m in masks])))
    flat = np.array([bit for mask in masks for bit in mask])
    batch = pa.RecordBatch.from_arrays(
        [
            pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat, pa.int32()), type=IDS),
            pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat, pa.int8()), type=MASK),
        ],
        names=["input_ids", "loss_mask"],
    )
    facts = filters.RowFacts.of(batch)
    assert filters.specforge(facts, None, 16).tolist() == [True, True, False, True, False]
    assert filters.specforge(facts, 21, 16).tolist() == [True, True, False, True, True]
    assert filters.speculators(facts, None, 16).tolist() == [True, False, False, False, False]
    assert filters.speculators(facts, 20, 16).tolist() == [True, False, False, False, True]
    assert filters.deepspec(facts, None, 16).tolist() == [True, True, True, True, False]
    assert filters.two_blocks(facts, None, 16).tolist() == [True, True, True, True, False]
    assert filters.two_blocks(facts, None, 32).tolist() == [True] * 5
    assert filters.model_optimizer(facts, 50, 16).tolist() == [True, True, True, True, True]
    sliced = filters.RowFacts.of(batch.slice(2, 3))
    assert filters.specforge(sliced, None, 16).tolist() == [False, True, False]
