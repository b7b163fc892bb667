"""Exports load with the trainers' own published code, and it keeps and drops what the export said."""

import json
from pathlib import Path

import pytest

from completions import assistant, completion, served, write_completions
from targets import qwen36, qwen36_directory
from tasks.records import Message
from tasks.settings import SamplingSettings
from tasks.target.text import TargetText
from tasks.tokenization.export.run import Exported, export
from tasks.tokenization.run import tokenize_chunk
from tasks.tokenization.settings import TokenizationSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ANSWER = "Because short waves scatter more in the air than the long ones do, so it looks blue."


@pytest.fixture(scope="module")
def chunk(tmp_path_factory) -> Path:
    target, folder = qwen36(), tmp_path_factory.mktemp("loaders")
    rows = [
        served(
            target,
            f"{n:032x}",
            [Message("user", f"Why {n}?"), assistant(ANSWER, "T1")],
            [f"T1\n</think>\n\n{ANSWER}<|im_end|>"],
        )
        for n in range(6)
    ]
    talk = [Message("user", "a"), assistant(ANSWER, "FIRST"), Message("user", "b"), assistant(ANSWER, "SECOND")]
    rows += [completion("talk", talk), completion("long", [Message("user", "word " * 200), assistant(ANSWER, "T")])]
    path = write_completions(folder / "completions.parquet", rows)
    settings = TokenizationSettings(min_content_tokens=1)
    tokenize_chunk(path, folder / "tokens.parquet", target, settings, SamplingSettings())
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The target's small files as a trainer's own libraries load them."""
    folder = tmp_path_factory.mktemp("model")
    for path in qwen36_directory().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = {"model_type": "qwen3", "vocab_size": 248320}
    (folder / "config.json").write_text(json.dumps(config))
    values = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**values, "tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def wrote(folder: Path) -> list[dict]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def key(rows: list[dict]) -> list[tuple]:
    return sorted((tuple(row["input_ids"]), tuple(row["loss_mask"])) for row in rows)


def said(target: TargetText, row: dict) -> str:
    return target.decode([i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m])


def test_specforge_reads_pretokenized_rows_and_drops_what_was_said(chunk, tmp_path, load):
    for name, length in (("all", 4096), ("cut", 128)):
        result: Exported = export(chunk, "specforge", tmp_path / name, seq_length=length)
        (path,) = (tmp_path / name).glob("*.jsonl")
        kept = load("specforge", path, length)
        assert result.rows - len(kept) == result.dropped_by_trainer == (0 if name == "all" else 1)
        if name == "all":
            assert key(kept) == key(wrote(tmp_path / name))


def test_specforge_renders_the_raw_rows_to_the_same_tokens(chunk, model, tmp_path, load):
    target = qwen36()
    export(chunk, "specforge", tmp_path / "ids")
    export(chunk, "specforge-raw", tmp_path / "raw")
    (path,) = (tmp_path / "raw").glob("*.jsonl")
    theirs = load("specforge_raw", path, model)
    ours = wrote(tmp_path / "ids")
    newline = target.encode("\n")
    assert sorted(tuple(row["input_ids"] + newline) for row in ours) == sorted(tuple(r["input_ids"]) for r in theirs)
    # their mask also takes the newline after the end of turn, which nobody sampled
    assert sorted(said(target, row) + "\n" for row in ours) == sorted(said(target, row) for row in theirs)


def test_speculators_passes_the_rows_through(chunk, model, tmp_path, load):
    for name, length in (("all", 8192), ("cut", 128)):
        result = export(chunk, "speculators", tmp_path / name, seq_length=length)
        found = load("speculators", tmp_path / name, model, length)
        assert result.rows - len(found["rows"]) == result.dropped_by_trainer == (0 if name == "all" else 1)
        if name == "all":
            assert key(found["rows"]) == key(wrote(tmp_path / name))


def test_speculators_trains_from_the_prepared_folder(chunk, model, tmp_path, load):
    export(chunk, "speculators", tmp_path / "jsonl")
    export(chunk, "speculators-prepared", tmp_path / "prepared")
    found = load("speculators_prepared", tmp_path / "prepared")
    theirs = load("speculators", tmp_path / "jsonl", model, 8192)
    assert found["features"] == theirs["features"]
    assert key(found["rows"]) == key(theirs["rows"])
    assert found["lengths"] == [len(row["input_ids"]) for row in found["rows"]]
