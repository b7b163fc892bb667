"""report.html and `regen status`: whole runs, runs with almost nothing, and damaged files."""

import json
import re
from html.parser import HTMLParser

import polars as pl
import pytest

from flows.cli import run as regen
from published_runs import make_chunk, make_run
from tasks.errors import SpecError
from tasks.report import charts
from tasks.report.figures import energy_j, figures, markdown
from tasks.report.find import find_run
from tasks.report.html import render, verdict_marks, write_report
from tasks.report.read import MOST_POINTS, read_run, thinned
from tasks.report.status import read_status
from tasks.runs import RunPaths, write_json

START_S = 1_790_000_000.0


def progress_line(number, **more):
    line = {
        "time_s": START_S + 2 * number,
        "total": 100,
        "done": number,
        "failed": 0,
        "in_flight": 8,
        "output_tokens": 1000 * number,
        "tok_s": 500.0,
        "power_w": 400.0,
        "accept_length": 2.5,
        "reject_rate": 0.02,
        "servers": {"s0": "up"},
    }
    return json.dumps({**line, **more}) + "\n"


@pytest.fixture
def whole(tmp_path):
    gates = {
        "mtp": {
            "verdict": "ON_AND_EFFECTIVE",
            "level": "ok",
            "mode": "enforce",
            "summary": "fine",
            "time_s": START_S + 4,
        },
        "power_baseline": {"verdict": "SLOW", "level": "warning", "mode": "monitor", "summary": "12 % below"},
    }
    paths = make_run(
        tmp_path / "set",
        "20260101-000000-aaaa",
        gates=gates,
        fleet=[{"server": "s0", "event": "restarted", "reason": "out of memory"}],
        generation={"retries": 12},
    )
    make_chunk(paths, 0, list(range(40)), [100])
    (paths.run_dir / "progress.jsonl").write_text("".join(progress_line(n) for n in range(60)) + '{"torn')
    seconds = list(range(120))
    pl.DataFrame(
        {
            "time_s": [START_S + s for s in seconds],
            "gpu_uuid": ["GPU-1"] * len(seconds),
            "power_average_w": [400.0] * len(seconds),
            "energy_j": [1e6 + 400.0 * s for s in seconds],
        }
    ).write_parquet(paths.power)
    windows = [
        {"server": "s0", "concurrency": c, "duration_s": 10, "output_tokens": 100 * c, "power_w": 300}
        for c in (4, 8, 16)
    ]
    write_json(paths.calibration, {"limits": {"s0": 8}, "windows": windows, "stopped_because": "plateau"})
    write_json(
        paths.forecast, {"forecasts": [{"made_s": START_S, "remaining_prompts": 100, "time_s": [200, 150, 260]}]}
    )
    return paths


class Page(HTMLParser):
    """Collects what a browser would fetch, and the headings."""

    def __init__(self):
        super().__init__()
        self.fetched, self.headings, self._in = [], [], ""

    def handle_starttag(self, tag, attributes):
        self._in = tag
        self.fetched += [v for n, v in attributes if n in ("src", "href", "xlink:href") and v and not v.startswith("#")]

    def handle_data(self, data):
        if self._in == "h2":
            self.headings.append(data.strip())


def test_a_whole_run_shows_every_section_and_fetches_nothing(whole):
    text = write_report(whole).read_text()
    page = Page()
    page.feed(text)
    assert page.fetched == []
    assert [h for h in page.headings if h] == [
        "What came in",
        "Throughput and watts",
        "Verdicts",
        "Lengths",
        "Calibration",
        "Forecast against reality",
        "Failures, retries and restarts",
        "Samples of answers",
        "Made with",
    ]
    assert text.count("<svg") == 5
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert "ON_AND_EFFECTIVE" in text and "out of memory" in text and "12 requests were sent again" in text
    assert not re.search(r"#01020\d", text), "every stand-in colour became a variable"
    assert "Cut at the output limit: none of 40 turns." in text
    assert "very-secret" not in text


def test_the_page_says_what_it_is_and_which_gate_warned(whole):
    text = render(read_run(whole))
    assert f"<title>set: run {whole.run_id}: report</title>" in text
    assert '<span class="badge warning">warning: power_baseline</span>' in text


def test_only_alarms_and_live_changes_are_marked_and_their_labels_do_not_overlap(whole):
    gate = {"mode": "monitor", "time_s": START_S + 10}
    levels = {"a": "ok", "b": "unknown", "c": "warning", "d": "critical", "e": "warning"}
    gates = {name: {**gate, "verdict": "SAID", "level": level} for name, level in levels.items()}
    changes = [{"time_s": START_S + 10, "verdict": "SLOWER", "summary": ""}]
    whole.note(gates=gates, power_verdicts=changes)
    data = read_run(whole)
    assert [mark["text"] for mark in verdict_marks(data)] == ["c SAID", "d SAID", "e SAID", "power SLOWER"]
    drawn = charts.svg(charts.lines(data.progress, "tok_s", "tokens a second", verdict_marks(data)))
    places = re.findall(r'transform="translate\(([^)]*)\)"[^>]*>(?:[a-e] SAID|power SLOWER)<', drawn)
    assert len(places) == 4 == len(set(places))


def test_calibration_ticks_are_the_levels_measured():
    windows = [{"concurrency": c, "tok_s": 10.0 * c} for c in (2, 3, 4)]
    drawn = charts.svg(charts.calibration(windows, [3.0]))
    assert {"2", "3", "4"} <= set(re.findall(r">([\d.]+)</text>", drawn))
    assert not re.search(r">[23]\.\d+</text>", drawn)


@pytest.mark.parametrize(("seconds", "unit"), [(90, "seconds"), (1500, "minutes"), (9000, "hours")])
def test_a_forecast_is_told_in_a_unit_that_fits(whole, seconds, unit):
    write_json(whole.forecast, {"forecasts": [{"made_s": START_S, "time_s": [seconds, seconds / 2, seconds]}]})
    text = render(read_run(whole))
    assert f"{unit.capitalize()} in all" in text and f"median, {unit}" in text and f"{unit} into the run" in text


@pytest.mark.parametrize("missing", ["power", "calibration", "forecast", "record", "spec", "progress", "chunks", "all"])
def test_what_is_missing_leaves_its_section_out(whole, missing):
    import shutil

    names = {"power": whole.power, "calibration": whole.calibration, "forecast": whole.forecast, "record": whole.record}
    names |= {"spec": whole.spec, "progress": whole.run_dir / "progress.jsonl", "chunks": whole.chunks}
    for name, path in names.items():
        if missing in (name, "all"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = render(read_run(whole))
    assert text.startswith("<!doctype html>")
    assert ("Calibration" in text) == (missing not in ("calibration", "all"))


@pytest.mark.parametrize(
    "junk", [b"", b"{", b"[]", b"null", b'{"windows": 3, "limits": [1], "gates": [], "validation": 7}']
)
def test_damaged_files_never_break_the_report(whole, junk):
    for path in (whole.calibration, whole.forecast, whole.record, whole.power, whole.chunk(0) / "chunk.json"):
        path.write_bytes(junk)
    (whole.chunk(0) / "tokens.parquet").write_bytes(junk)
    text = render(read_run(whole))
    assert "Output tokens of an answer" in text
    assert "could not be drawn" not in text


def test_nonsense_in_one_part_is_said_and_the_rest_is_shown(whole):
    write_json(whole.calibration, {"windows": [{"concurrency": 1, "output_tokens": "many"}]})
    text = render(read_run(whole))
    assert "This part could not be drawn" in text
    assert "Output tokens of an answer" in text


def test_what_a_model_says_cannot_become_markup(tmp_path):
    paths = make_run(tmp_path / "set", "run1")
    make_chunk(paths, 0, [1], text="<script>alert(1)</script>")
    text = render(read_run(paths))
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_figures_add_up(whole):
    found = figures(read_run(whole))
    assert (found.done, found.failed, found.output_tokens) == (59, 1, 59_000)
    assert found.energy_j == pytest.approx(400 * 119)
    assert found.j_per_token == pytest.approx(400 * 119 / 59_000)
    assert found.accept_length == pytest.approx(2.5)
    assert "| answered | 59 of 100 |" in markdown(found)


def test_energy_from_watts_where_the_counter_is_missing():
    frame = pl.DataFrame(
        {"time_s": [0.0, 10.0, 20.0], "gpu_uuid": ["a"] * 3, "watts": [100.0, 200.0, 100.0], "energy_j": [None] * 3},
        schema={"time_s": pl.Float64, "gpu_uuid": pl.String, "watts": pl.Float64, "energy_j": pl.Float64},
    )
    assert energy_j(frame) == pytest.approx(3000.0)
    reset = frame.with_columns(energy_j=pl.Series([100.0, 500.0, 50.0]))
    assert energy_j(reset) == pytest.approx(400.0)
    assert energy_j(frame.head(0)) is None


def test_long_runs_are_thinned():
    frame = pl.DataFrame({"time_s": [float(n) for n in range(100_000)], "v": [1.0] * 100_000})
    assert thinned(frame, ["v"]).height <= MOST_POINTS + 1


def test_status_of_a_running_an_interrupted_and_a_finished_run(whole):
    (whole.dataset_dir / "current").write_text(whole.run_id)
    touched = (whole.run_dir / "progress.jsonl").stat().st_mtime
    running = read_status(whole, now_s=touched + 5)
    assert running.state == "running"
    assert running.recent_tok_s == pytest.approx(500.0)
    assert running.eta_s is not None and running.eta_s[0] == pytest.approx(80.0)
    assert running.as_dict()["servers"] == {"s0": "up"}
    later = read_status(whole, now_s=max(touched, whole.power.stat().st_mtime) + 4000)
    assert later.state == "interrupted"
    assert ("next", "run the same command again: it goes on") in later.rows()
    whole.note(summary={"done": 59, "manifest": "m"})
    assert read_status(whole, now_s=touched + 4000).state == "published"


def test_servers_are_shown_only_while_a_run_goes_on_and_an_error_is_told(whole):
    (whole.dataset_dir / "current").write_text(whole.run_id)
    now = max((whole.run_dir / name).stat().st_mtime for name in ("progress.jsonl", "record.json"))
    assert dict(read_status(whole, now_s=now + 5).rows())["servers"] == "1 up"
    for kind, state in (("GateError", "failed"), ("KeyboardInterrupt", "interrupted")):
        whole.note(error={"kind": kind, "message": "40 of the last 50 answers were bad"})
        status = read_status(whole, now_s=now + 5)
        shown = dict(status.rows())
        assert (status.state, status.as_dict()["servers"], "servers" in shown) == (state, {}, False)
        assert shown.get("error") == ("GateError: 40 of the last 50 answers were bad" if state == "failed" else None)
        assert "run the same command again" in shown["next"]
    whole.note(error=None)
    assert read_status(whole, now_s=now + 5).state == "running"


def test_status_of_a_run_with_nothing_new(tmp_path):
    paths = make_run(tmp_path / "set", "run2", prompts={"pending": 0, "kept": 25})
    status = read_status(paths)
    assert (status.state, status.figures.total, status.figures.pending) == ("finished", 0, 0)


def test_a_published_copy_is_not_the_run(whole, tmp_path):
    import os
    import shutil

    copy = tmp_path / "published" / "runs" / whole.run_id
    copy.mkdir(parents=True)
    shutil.copy(whole.spec, copy / "spec.json")
    os.utime(copy / "spec.json", (4e9, 4e9))
    assert find_run(tmp_path).paths.run_dir == whole.run_dir.resolve()


def test_find_run_takes_the_one_worked_on_last(whole, tmp_path):
    import os

    other = make_run(tmp_path / "set", "20250101-000000-bbbb")
    for path in other.run_dir.iterdir():
        os.utime(path, (1, 1))
    for where in (whole.run_dir, whole.dataset_dir, tmp_path):
        assert find_run(where).paths == RunPaths(whole.dataset_dir.resolve(), whole.run_id)
    with pytest.raises(SpecError, match="no run at or below"):
        find_run(tmp_path / "nothing")


def test_a_repeat_with_nothing_new_does_not_hide_the_run_before_it(whole, tmp_path, capsys):
    import os

    idle = make_run(tmp_path / "set", "20270101-000000-cccc", prompts={"pending": 0})
    os.utime(idle.record, (4e9, 4e9))
    assert find_run(tmp_path).paths.run_id == whole.run_id
    assert find_run(idle.run_dir).paths.run_id == idle.run_id
    for name in ("status", "report"):
        assert regen([name, str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert f"newer run {idle.run_id} had nothing to do" in text
        assert json.loads(text.strip().split("\n")[-1])["run_id"] == whole.run_id
    begun = make_run(tmp_path / "set", "20270101-000001-dddd")
    os.utime(begun.record, (4.1e9, 4.1e9))
    assert find_run(tmp_path).paths.run_id == begun.run_id, "a run that still validates is not idle"


def test_only_idle_runs_are_shown_as_they_are(tmp_path):
    paths = make_run(tmp_path / "set", "run1", prompts={"pending": 0})
    found = find_run(tmp_path)
    assert (found.paths.run_id, found.note) == (paths.run_id, None)


@pytest.mark.parametrize("name", ["status", "report", "verify"])
def test_commands_end_with_one_json_object(whole, capsys, name):
    where = whole.run_dir if name == "verify" else whole.dataset_dir
    assert regen([name, str(where)]) == 0
    last = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert {"status": "state", "report": "report", "verify": "verdict"}[name] in last


def test_verify_command_exits_3_on_a_difference(whole, capsys):
    frame = pl.read_parquet(whole.chunk(0) / "completions.parquet")
    frame.head(3).write_parquet(whole.chunk(0) / "completions.parquet")
    assert regen(["verify", str(whole.run_dir)]) == 3
    assert json.loads(capsys.readouterr().out.strip().split("\n")[-1])["verdict"] == "DIFFERENT"
