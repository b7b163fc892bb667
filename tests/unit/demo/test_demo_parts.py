"""The demo's checks, places and screens, without its servers."""

import io
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from flows import demo_services
from flows.demo import build_spec, job_path
from flows.demo_published import read_back
from flows.demo_screen import progress_bar, summary_table
from flows.demo_services import (
    DemoOptions,
    _enter_together,
    check_prompts,
    environment,
    exclusive,
    prepare_out,
    terminate_as_interrupt,
)
from flows.progress import listeners, listening, publish
from flows.reporter import describe
from flows.spec import RegenSpec
from published_runs import make_chunk, make_run
from tasks.errors import DatasetError, StorageError
from tasks.provisioning.local_store import LocalStore
from tasks.records import Progress
from tasks.storage import open_store
from tasks.upload.chunk import upload_chunk
from tasks.upload.snapshot import publish_snapshot

STORE = LocalStore("http://127.0.0.1:1", "regen-demo", "access", "secret", Path("weed.log"))
PROMPTS = Path(demo_services.__file__).with_name("demo_prompts.jsonl")


def progress(done, failed=0, total=10):
    return Progress(total, done, failed, 2, 1234, 10.0, 123.4, eta_s=(5.0, 4.0, 6.0))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no prompt file"),
        ("empty.jsonl", b"", "is empty"),
        ("blank.jsonl", b"\n \n\n", "is empty"),
        ("binary.jsonl", b'{"prompt": "x"}\n\0\x01\xff', "is binary"),
        ("program", bytes(range(256)), "is binary"),
    ],
)
def test_unusable_prompt_files_are_refused_before_anything_starts(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        check_prompts(str(path))


@pytest.mark.parametrize("prompts", [None, "s3://bucket/prompts", "hf://org/name", "data/*.jsonl"])
def test_sources_that_are_not_one_local_file_are_left_to_validation(prompts):
    check_prompts(prompts)


def test_parquet_and_folders_are_not_taken_for_binary_text(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1\0\0")
    check_prompts(str(tmp_path / "rows.parquet"))
    check_prompts(str(tmp_path))


def test_a_full_disk_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_services, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(StorageError, match="disk full"):
        prepare_out(tmp_path / "out")


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(StorageError, match="choose another --out"):
        prepare_out(tmp_path / "out")


def test_one_demo_a_folder(tmp_path):
    with exclusive(tmp_path), pytest.raises(StorageError, match=f"process {os.getpid()}"), exclusive(tmp_path):
        pass
    with exclusive(tmp_path):
        pass


def test_the_spec_is_the_job_file_with_this_runs_places(tmp_path):
    (tmp_path / "mine.jsonl").write_text("{}")
    spec = build_spec(DemoOptions(tmp_path, str(tmp_path / "mine.jsonl"), 5), STORE)
    assert spec.source.paths == (str(tmp_path / "mine.jsonl"),)
    assert spec.source.limit == 5
    assert spec.publish.work_dir == str(tmp_path)
    assert spec.publish.store == "s3://regen-demo/demo"
    assert spec.publish.endpoint_url == STORE.endpoint_url
    assert RegenSpec.model_validate(spec.groups()) == spec


def test_places_prompts_and_limits_do_not_change_which_data_set_it_is(tmp_path):
    one = build_spec(DemoOptions(tmp_path / "a"), STORE)
    other = build_spec(DemoOptions(tmp_path / "b", "s3://x/y", 3), STORE)
    assert one.identity_digest() == other.identity_digest()


def test_the_job_file_is_found():
    assert job_path().name == "demo.yaml"


def test_demo_prompts_are_many_and_some_are_broken_on_purpose():
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    assert 95 <= len(lines) <= 120
    broken, multi_turn = 0, 0
    for line in lines:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            broken += 1
            continue
        turns = row.get("messages", row.get("conversations", [])) if isinstance(row, dict) else []
        multi_turn += len(turns) >= 3
    assert broken >= 2
    assert multi_turn >= 6


def test_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("REGEN_A", "old")
    monkeypatch.delenv("REGEN_B", raising=False)
    monkeypatch.setenv("REGEN_C", "hidden")
    with environment({"REGEN_A": "new", "REGEN_B": "new"}, without=["REGEN_C"]):
        assert (os.environ["REGEN_A"], os.environ["REGEN_B"]) == ("new", "new")
        assert "REGEN_C" not in os.environ
    assert os.environ["REGEN_A"] == "old"
    assert "REGEN_B" not in os.environ
    assert os.environ["REGEN_C"] == "hidden"


@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_sigterm_is_an_interrupt(inherited):
    before = signal.signal(signal.SIGINT, inherited)
    try:
        with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is inherited
    finally:
        signal.signal(signal.SIGINT, before)


def test_when_one_server_fails_the_other_is_ended():
    events = []

    @contextmanager
    def ends():
        try:
            yield 1
        finally:
            events.append("down")

    @contextmanager
    def fails():
        raise StorageError("no room")
        yield

    with pytest.raises(StorageError, match="no room"), ExitStack() as stack:
        _enter_together(stack, [ends(), fails()])
    assert events == ["down"]


def test_a_listener_hears_and_a_failing_one_disturbs_nobody(caplog):
    heard = []

    def fail(_):
        raise ValueError("screen is gone")

    with listening(fail), listening(heard.append):
        publish(progress(3))
    publish(progress(4))
    assert [one.done for one in heard] == [3]
    assert "screen is gone" in caplog.text
    assert listeners == []


def test_the_bar_shows_what_is_done_and_the_rate():
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    with progress_bar(console):
        publish(progress(3, failed=1))
    text = console.file.getvalue()
    assert "4/10" in text and "123 tok/s" in text and "1 failed" in text and "about 5 s left" in text


def test_without_a_terminal_the_first_and_the_last_are_lines():
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    with progress_bar(console):
        for done in (1, 2, 3, 10):
            publish(progress(done))
    lines = console.file.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["done 1/10", "done 10/10"]


def test_a_progress_line_tells_failed_prompts_from_bad_answers():
    going = describe(replace(progress(3), reject_rate=0.037))
    assert "failed 0 · bad answers lately 3.7%" in going and "ETA 5 s" in going
    ended = describe(progress(9, failed=1))
    assert "failed 1 · in flight" in ended and "bad answers" not in ended and "ETA" not in ended


def table_text(result):
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_table(result))
    return console.file.getvalue()


def test_the_table_tells_counts_and_places():
    names = {"rows": 106, "kept": 92, "rejected": 12, "duplicates": 2, "completed": 90, "done": 90, "failed": 2}
    result = {
        **names,
        "run_id": "r1",
        "run_dir": "/o/r1",
        "output_tokens": 9876,
        "tok_s": 101.2,
        "ui": "http://u",
        "ui_pid": 7,
    }
    result |= {"store": "s3://regen-demo/demo", "manifest": "/o/published/manifest.json", "token_rows": 100}
    counts = {"conversations": 90, "turns": 100, "cut_conversations": 1, "cut_turns": 2, "ended_by_cut": 1}
    text = table_text({**result, "turns": counts})
    for shown in (
        "106",
        "12, and 2 duplicates",
        "90 of 92 kept; 2 failed",
        "9,876, 101 tok/s",
        "http://u/runs, until: kill 7",
        "100, one a turn: 100 answered turns of 90 conversations",
        "1 conversation, 2 of 100 turns; 1 ended there",
    ):
        assert shown in text
    assert "12, and 1 duplicate " in table_text({**result, "duplicates": 1})
    plain = table_text({**result, "duplicates": 0})
    assert "duplicate" not in plain and "output limit" not in plain


def test_reading_back_brings_the_card_and_counts_turns(tmp_path):
    store = open_store(tmp_path / "store")
    paths = make_run(tmp_path / "work" / "set", "run1")
    publish_snapshot(store, paths, [upload_chunk(store, "run1", paths.chunk(0), make_chunk(paths, 0, [1, 2]))])
    spec = build_spec(DemoOptions(tmp_path), STORE)
    spec = spec.model_copy(update={"publish": spec.publish.model_copy(update={"store": str(tmp_path / "store")})})
    found = read_back(spec, STORE, tmp_path / "back")
    assert {path for path in found["files"] if not (tmp_path / "back" / path).is_file()} == set()
    assert "README.md" in found["files"] and (tmp_path / "back" / "README.md").read_text().startswith("---")
    assert (found["manifest"], found["token_rows"]) == (str(tmp_path / "back" / "manifest.json"), 2)
    assert (found["turns"]["conversations"], found["turns"]["turns"]) == (2, 2)


def test_the_demo_does_not_import_prefect_before_it_knows_the_server():
    """Threads that are not the flow's read the process's settings, which are made at the first import."""
    code = "import sys, flows.demo, flows.commands.demo; print('prefect' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
