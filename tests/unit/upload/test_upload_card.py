"""The card is read as people read it: its header by a YAML reader, its code by running it."""

import re

import pytest
import yaml

from published_runs import make_chunk, make_run, prompt_id
from tasks.storage import open_store
from tasks.upload.card import render_card
from tasks.upload.chunk import upload_chunk
from tasks.upload.snapshot import publish_snapshot


@pytest.fixture
def published(tmp_path):
    store = open_store(tmp_path / "store")
    paths = make_run(tmp_path / "work" / "set", "run1")
    chunks = [
        upload_chunk(store, "run1", paths.chunk(i), make_chunk(paths, i, done)) for i, done in enumerate(([1, 2], [3]))
    ]
    return store, publish_snapshot(store, paths, chunks)


def code_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_header_names_exactly_the_files_of_the_snapshot(published):
    store, manifest = published
    header = yaml.safe_load(store.get_bytes("README.md").decode().split("---\n")[1])
    configs = {c["config_name"]: c["data_files"][0]["path"] for c in header["configs"]}
    assert configs["tokens"] == manifest["current"]["files"]["tokens"]
    assert configs["completions"] == manifest["current"]["files"]["completions"]


def test_the_printed_code_reads_the_rows(published, tmp_path, monkeypatch):
    store, _ = published
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    first, second = code_blocks(store.get_bytes("README.md").decode())
    names: dict = {}
    exec(first, names)
    assert sorted(names["rows"].collect()["prompt_id"]) == sorted(map(prompt_id, [1, 2, 3]))
    exec(second, names)
    assert sorted(names["rows"]["prompt_id"]) == sorted(map(prompt_id, [1, 2, 3]))
    assert names["rows"][0]["input_ids"][:3] == [1, 2, 3]


def test_hugging_face_reads_the_folder_by_its_header(published, tmp_path, monkeypatch):
    store, _ = published
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.load_dataset(store.url, "completions", split="train", cache_dir=str(tmp_path / "cache"))
    assert sorted(rows["prompt_id"]) == sorted(map(prompt_id, [1, 2, 3]))


def test_a_person_finds_the_figures(published):
    store, manifest = published
    text = render_card(manifest, store.url)
    for words in (
        "3 answered prompts, 3 training rows (one a turn)",
        "cut at the output limit: none of 3 turns",
        "org/tiny",
        "revision `abc`",
        "sglang 0.5.19",
        "ON_AND_EFFECTIVE",
    ):
        assert words in text
    assert 'boto3.client("s3")' in render_card(manifest, "s3://bucket/set")
