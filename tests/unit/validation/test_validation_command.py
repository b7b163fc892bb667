"""`regen validate` as a person and a script see it: a verdict at a glance, one last line of JSON, exit statuses."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.cli import run
from validation_rows import SmallTarget, chat

BAD, GOOD = [5, 20, 3, 5, 4, 2, 4, 30, 31, 3], [5, 20, 3, 5, 1, *range(40, 60), 2, 50, 51, 3]


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    """100 rows, 87 of them with 6 supervised tokens of which 4 are scaffold."""
    ids = [[*BAD[:1], i % 90 + 6, *BAD[1:]] for i in range(87)] + [
        [*GOOD[:1], i % 90 + 6, *GOOD[1:]] for i in range(13)
    ]
    mask = [[0] * 5 + [1] * 6] * 87 + [[0] * 5 + [1] * (len(GOOD) - 4)] * 13
    path = tmp_path / "incident.parquet"
    pq.write_table(pa.table({"input_ids": ids, "loss_mask": mask}), path)
    return path


@pytest.fixture
def small_target(monkeypatch: pytest.MonkeyPatch) -> None:
    import tasks.target.load

    monkeypatch.setattr(tasks.target.load, "load_target", lambda settings: SmallTarget())


def last_line(text: str) -> dict[str, Any]:
    return dict(json.loads(text.strip().splitlines()[-1]))


@pytest.mark.usefixtures("small_target")
def test_the_incident_at_a_glance(incident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("report.json", "rejected.parquet", "kept.parquet", "plot.png")}
    options = [x for name, path in files.items() for x in (f"--{name.split('.')[0]}", str(path))]
    assert run(["validate", str(incident), "--target", "small", *options]) == 3
    out, screen = capsys.readouterr()
    line = last_line(out)
    assert {"rows": 100, "kept": 13, "rejected": 87, "duplicates": 0}.items() <= line.items()
    assert line["reasons"] == {"TOO_FEW_SUPERVISED_TOKENS": 87} and line["verdict"] == "EMPTY_ANSWERS"
    words = " ".join(screen.replace("│", " ").split())
    assert "87.0% of 100 samples supervise fewer than 8 content tokens" in words
    assert "6 supervised tokens, 4 of them template scaffold" in words
    assert "'4 2 4 30 31 3'" in words and "100 rows = 13 kept + 87 rejected + 0 duplicates" in words
    assert json.loads(files["report.json"].read_text())["report"]["stops"] is True
    assert pq.read_metadata(files["rejected.parquet"]).num_rows == 87
    assert pq.read_table(files["kept.parquet"])["n_content"].to_pylist() == [22] * 13
    assert files["plot.png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("small_target")
def test_monitor_reports_and_a_lower_floor_passes(incident: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", str(incident), "--target", "small", "--gate", "monitor"]) == 0
    assert last_line(capsys.readouterr().out)["verdict"] == "EMPTY_ANSWERS"
    assert run(["validate", str(incident), "--target", "small", "--min-content-tokens", "2"]) == 0
    assert last_line(capsys.readouterr().out)["verdict"] == "PASSED"


def test_without_a_target_the_incident_is_still_found(incident: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", str(incident)]) == 3
    assert last_line(capsys.readouterr().out)["verdict"] == "EMPTY_ANSWERS"


@pytest.mark.parametrize(
    ("data", "status", "found"),
    [
        (b"", 2, "is empty"),
        (bytes(range(256)), 2, "binary"),
        (None, 2, "does not exist"),
        (b'{"messages": 7}\n{"messages": 8}\n', 3, "BAD_MESSAGE"),
    ],
)
def test_bad_input_is_one_clear_error(
    data: bytes | None, status: int, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "set.jsonl"
    if data is not None:
        path.write_bytes(data)
    assert run(["validate", str(path)]) == status
    out, screen = capsys.readouterr()
    line = last_line(out)
    assert found in json.dumps(line) and "Traceback" not in screen
    if status == 3:
        assert line["verdict"] == "NOTHING_USABLE" and line["rejected"] == 2


def test_prompts_with_bad_answers_pass_where_one_regenerates(jsonl: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = jsonl([chat(f"q{i}", "") for i in range(4)])
    assert run(["validate", str(source)]) == 3
    capsys.readouterr()
    assert run(["validate", str(source), "--prompts"]) == 0
    assert last_line(capsys.readouterr().out)["regenerate_reasons"] == {"EMPTY_ASSISTANT": 4}


def test_hostile_text_in_details_is_shown_as_it_is(jsonl: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = jsonl([{"messages": [{"role": "[red]x[/blue]", "content": ""}]}, chat("q", "a long enough answer " * 9)])
    assert run(["validate", str(source), "--max-reject-share", "0.6"]) == 0
    assert "[red]x[/blue]" in capsys.readouterr().err


def test_a_missing_argument_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate"]) == 2
    assert last_line(capsys.readouterr().out)["kind"] == "usage"


def test_a_chat_template_without_a_target_is_a_usage_error(
    incident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}")
    assert run(["validate", str(incident), "--chat-template", str(template)]) == 2
    line = last_line(capsys.readouterr().out)
    assert line["kind"] == "usage" and "--target" in line["error"]


def test_a_path_that_no_file_system_takes_is_an_input_error(capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("a" * 300, f"{'b' * 300}/*.jsonl", f"there/{'c' * 300}.jsonl"):
        assert run(["validate", path]) == 2
        out, screen = capsys.readouterr()
        line = last_line(out)
        assert line["kind"] == "DatasetError" and path in line["error"] and "Traceback" not in screen
