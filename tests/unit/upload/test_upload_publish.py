"""From chunk folders to a published snapshot, on a folder as the store."""

import json
import threading

import polars as pl
import pytest

from published_runs import make_chunk, make_run, prompt_id
from tasks.errors import GateError, StorageError, VerificationError
from tasks.storage import open_store
from tasks.upload.chunk import upload_chunk
from tasks.upload.manifest import (
    active_parts,
    empty,
    entries,
    parse,
    read_manifest,
    refuse_foreign,
    update_manifest,
)
from tasks.upload.provenance import redact
from tasks.upload.published import published_ids, published_table, skip_ids, write_skip_ids
from tasks.upload.snapshot import publish_snapshot
from tasks.upload.subtract import Subtraction, subtract
from tasks.upload.verify import verify


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store")


def publish(store, tmp_path, run_id, chunks, **facts):
    """`chunks`: list of (done, failed) prompt numbers."""
    text = facts.pop("text", "answer")
    paths = make_run(tmp_path / "work" / "set", run_id, **facts)
    sent = []
    for index, (done, failed) in enumerate(chunks):
        record = make_chunk(paths, index, done, failed, text=text)
        sent.append(upload_chunk(store, run_id, paths.chunk(index), record))
    return publish_snapshot(store, paths, sent)


def read(store, kind):
    manifest, _ = read_manifest(store)
    return pl.concat([pl.read_parquet(store.root / key) for key in manifest["current"]["files"][kind]])


def test_a_run_becomes_a_snapshot(store, tmp_path):
    manifest = publish(store, tmp_path, "run1", [([1, 2], [3]), ([4], [])])
    assert manifest["current"]["rows"] == {"completions": 3, "failed": 1, "tokens": 3, "chunk": 0}
    assert sorted(read(store, "tokens")["prompt_id"]) == sorted(map(prompt_id, [1, 2, 4]))
    newest = manifest["snapshots"][-1]
    assert newest["counts"]["done"] == 3
    assert newest["counts"]["failed_reasons"] == {"DEGENERATE_REPETITION": 1}
    assert newest["counts"]["supervised_tokens"] == 3 + 4 + 6
    assert newest["identity_digest"] == "d" * 64
    assert (newest["model"], newest["revision"], newest["template_sha256"]) == ("org/tiny", "abc", "t" * 64)
    assert newest["mtp"] == {"verdict": "ON_AND_EFFECTIVE", "accept_length": 2.9}
    assert newest["gpus"][0]["driver"] == "580.1"
    assert newest["servers"][0]["version"] == "0.5.19"
    assert newest["rejects"]["validation"] == {"NO_USER_TURN": 2}
    assert "not shifted" in manifest["conventions"]["loss_mask"]
    assert "very-secret" not in json.dumps(manifest)
    result = verify(store.url)
    assert result.verdict == "IDENTICAL"
    assert result.files == len(list(entries(manifest))) > 8


def test_publishing_twice_changes_nothing_for_a_reader(store, tmp_path):
    first = publish(store, tmp_path, "run1", [([1, 2], [3])])
    second = publish(store, tmp_path, "run1", [([1, 2], [3])])
    assert second["current"] == first["current"]
    assert len(second["snapshots"]) == 1


def test_a_second_run_refers_to_the_first(store, tmp_path):
    publish(store, tmp_path, "run1", [([1, 2], [3])])
    sent_before = store.bytes_sent
    manifest = publish(store, tmp_path, "run2", [([7], [])])
    assert manifest["snapshots"][-1]["previous"] == "run1"
    assert active_parts(manifest) == ["run1/00000", "run2/00000"]
    assert active_parts(manifest, "run1") == ["run1/00000"]
    assert sorted(read(store, "completions")["prompt_id"]) == sorted(map(prompt_id, [1, 2, 7]))
    assert not any("run1" in e["key"] for e in manifest["snapshots"][-1]["documents"])
    assert store.bytes_sent - sent_before < 60_000
    assert verify(store.url).verdict == "IDENTICAL"


def test_nothing_new_publishes_nothing(store, tmp_path):
    before = publish(store, tmp_path, "run1", [([1], [])])
    paths = make_run(tmp_path / "work" / "set", "run2")
    assert publish_snapshot(store, paths, []) == before
    assert publish_snapshot(open_store(tmp_path / "other"), paths, [])["snapshots"] == []


def test_published_ids_and_force(store, tmp_path):
    assert published_ids(store).to_list() == []
    publish(store, tmp_path, "run1", [([1, 2], [3])])
    assert set(published_ids(store)) == {prompt_id(n) for n in (1, 2, 3)}
    assert skip_ids(store, force_ids=[prompt_id(1)]) == {prompt_id(2), prompt_id(3)}
    assert skip_ids(store, force_reasons=["DEGENERATE_REPETITION"]) == {prompt_id(1), prompt_id(2)}
    assert write_skip_ids(store, tmp_path / "skip.parquet") == 3
    assert pl.read_parquet(tmp_path / "skip.parquet")["prompt_id"].is_sorted()


def test_forced_prompts_replace_their_old_rows_and_only_those(store, tmp_path):
    publish(store, tmp_path, "run1", [([1, 2], [3]), ([4], [])])
    manifest = publish(store, tmp_path, "run2", [([1, 3], [4])], text="better")
    rows = read(store, "completions")
    answers = {row["prompt_id"]: row["messages"][-1]["content"] for row in rows.to_dicts()}
    # 4 failed this time: its old answer stays. 3 had failed before and is answered now.
    assert answers == {
        prompt_id(1): "better 1",
        prompt_id(2): "answer 2",
        prompt_id(3): "better 3",
        prompt_id(4): "answer 4",
    }
    assert rows.height == 4
    assert sorted(read(store, "tokens")["prompt_id"]) == sorted(answers)
    assert manifest["snapshots"][-1]["drops"] == ["run1/00000"]
    assert "run1/00001" in active_parts(manifest)
    assert active_parts(manifest, "run1") == ["run1/00000", "run1/00001"]
    assert verify(store.url).verdict == "IDENTICAL"
    table = {row["prompt_id"]: row["outcome"] for row in published_table(store).to_dicts()}
    assert table[prompt_id(3)] == "completed"


def test_prompts_that_left_the_source_stay_published(store, tmp_path):
    publish(store, tmp_path, "run1", [([1, 2], [3])])
    prompts = tmp_path / "prompts.parquet"
    pl.DataFrame({"prompt_id": [prompt_id(9), prompt_id(1)]}).write_parquet(prompts)
    found = subtract(prompts, prompts, published_table(store), force_ids=[prompt_id(1)])
    assert found == Subtraction(accepted=2, new=2, already=0, forced=1, vanished=2)
    assert pl.read_parquet(prompts)["prompt_id"].to_list() == [prompt_id(9), prompt_id(1)]
    found = subtract(prompts, tmp_path / "new.parquet", published_table(store))
    assert found == Subtraction(accepted=2, new=1, already=1, forced=0, vanished=2)
    assert pl.read_parquet(tmp_path / "new.parquet")["prompt_id"].to_list() == [prompt_id(9)]
    assert set(published_ids(store)) == {prompt_id(n) for n in (1, 2, 3)}


def test_a_rejected_training_row_is_settled_with_its_reason(store, tmp_path):
    paths = make_run(tmp_path / "work" / "set", "run1")
    record = make_chunk(paths, 0, [1, 2])
    folder = paths.chunk(0)
    pl.read_parquet(folder / "tokens.parquet").head(1).write_parquet(folder / "tokens.parquet")
    pl.DataFrame(
        {"prompt_id": [prompt_id(1), prompt_id(2)], "reason": ["TRUNCATED", "TOO_FEW_SUPERVISED_TOKENS"]}
    ).write_parquet(folder / "tokens_rejected.parquet")
    publish_snapshot(store, paths, [upload_chunk(store, "run1", folder, record)])
    table = {row["prompt_id"]: (row["outcome"], row["reason"]) for row in published_table(store).to_dicts()}
    # Prompt 1 lost one turn but kept another: it is completed.
    assert table == {prompt_id(1): ("completed", None), prompt_id(2): ("rejected", "TOO_FEW_SUPERVISED_TOKENS")}


@pytest.mark.parametrize(
    "server",
    [
        {"name": "s", "simulated_acceptance": True},
        {"name": "s", "arguments": {"SGLANG_SIMULATE_ACC_LEN": 3}},
    ],
)
def test_simulated_acceptance_is_refused(store, tmp_path, server):
    with pytest.raises(GateError, match="simulates acceptance"):
        publish(store, tmp_path, "run1", [([1], [])], servers=[server])
    assert read_manifest(store) == (None, None)


def test_no_manifest_names_a_missing_file(store, tmp_path):
    paths = make_run(tmp_path / "work" / "set", "run1")
    sent = [upload_chunk(store, "run1", paths.chunk(0), make_chunk(paths, 0, [1]))]
    store.delete(sent[0].files[0].key)
    with pytest.raises(VerificationError, match="missing or short"):
        publish_snapshot(store, paths, sent)
    assert read_manifest(store) == (None, None)


@pytest.mark.parametrize("damage", ["change", "cut", "remove", "manifest", "lie"])
def test_verify_finds_every_difference(store, tmp_path, damage):
    manifest = publish(store, tmp_path, "run1", [([1, 2], [])])
    path = store.root / manifest["current"]["files"]["tokens"][0]
    data = bytearray(path.read_bytes())
    if damage == "change":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "remove":
        path.unlink()
    elif damage == "manifest":
        text = (store.root / "manifest.json").read_text()
        (store.root / "manifest.json").write_text(text.replace('"generation": 1', '"generation": 2'))
    else:
        manifest["current"]["rows"]["tokens"] = 99
        from tasks.upload.manifest import dump

        (store.root / "manifest.json").write_bytes(dump(manifest))
    result = verify(store.url)
    assert result.verdict == "DIFFERENT"
    assert len(result.differences) == 1


def test_verify_of_a_run_folder(store, tmp_path):
    publish(store, tmp_path, "run1", [([1, 2], [])])
    run = tmp_path / "work" / "set" / "runs" / "run1"
    assert verify(run).verdict == "IDENTICAL"
    path = run / "chunks" / "00000" / "tokens.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    assert "tokens.parquet" in verify(run).differences[0]
    with pytest.raises(StorageError, match="nothing is published"):
        verify(tmp_path / "nowhere")


def test_verify_of_an_unpublished_run_checks_rows(tmp_path):
    paths = make_run(tmp_path / "set", "run1")
    make_chunk(paths, 0, [1, 2])
    result = verify(paths.run_dir)
    assert result.verdict == "IDENTICAL"
    assert result.rows == {"completions": 2, "tokens": 2, "failed": 0}
    assert result.rows_text == "2 completions, 2 token rows"
    frame = pl.read_parquet(paths.chunk(0) / "completions.parquet")
    frame.head(1).write_parquet(paths.chunk(0) / "completions.parquet")
    assert "1 rows, chunk.json says 2" in verify(paths.run_dir).differences[0]


def test_foreign_files_are_refused_by_name_and_kept(store):
    (store.root).mkdir()
    refuse_foreign(store)
    for name in ("shard-00000.parquet", "manifest.json", "thesis.docx"):
        (store.root / name).write_text("{}")
    with pytest.raises(StorageError, match=r"thesis\.docx"):
        refuse_foreign(store)
    assert sorted(p.name for p in store.root.iterdir()) == ["manifest.json", "shard-00000.parquet", "thesis.docx"]


def test_concurrent_writers_lose_nothing(store):
    store.put_bytes("runs/x", b"1")

    def add(number):
        def change(manifest):
            manifest["snapshots"].append({"id": str(number), "adds": [], "drops": [], "documents": []})
            return manifest

        update_manifest(store, "set", change)

    threads = [threading.Thread(target=add, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manifest, _ = read_manifest(store)
    assert {s["id"] for s in manifest["snapshots"]} == set(map(str, range(8)))
    assert manifest["generation"] == 8


def test_damaged_or_foreign_manifests_say_so():
    with pytest.raises(VerificationError, match="not JSON"):
        parse(b"{", "m")
    with pytest.raises(VerificationError, match="not ours"):
        parse(b"[]", "m")
    with pytest.raises(VerificationError, match="digest"):
        parse(json.dumps({**empty("x"), "sha256": "0"}).encode(), "m")


def test_secrets_are_hidden_and_numbers_kept():
    found = redact(
        {"api_key": "abc", "hf_token": "x", "max_tokens": 5, "tokenizer": "dir", "key_bytes": 3, "password": ""}
    )
    assert found == {
        "api_key": "(hidden)",
        "hf_token": "(hidden)",
        "max_tokens": 5,
        "tokenizer": "dir",
        "key_bytes": 3,
        "password": "",
    }
