"""MTP verdicts, from recorded answers and by hand; and the live watch."""

import json

import pytest

from paths import shared
from tasks.provisioning.mtp import AcceptWatch, MtpEvidence, Verdict, gather, judge, mtp_gate, report
from tasks.provisioning.settings import MtpSettings
from tasks.provisioning.wire import Answer
from tasks.records import Level, Server

SETTINGS = MtpSettings()


def evidence(**facts: object) -> MtpEvidence:
    base = {
        "server": "s0",
        "engine": "sglang",
        "algorithm": "EAGLE",
        "steps": 3,
        "accept_length": 2.9,
        "verify_steps": 200,
    }
    return MtpEvidence(**{**base, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "wanted", "verdict", "level"),
    [
        ({}, True, Verdict.ON_AND_EFFECTIVE, Level.OK),
        ({"accept_length": 1.2}, True, Verdict.ON_AND_EFFECTIVE, Level.OK),
        ({"accept_length": 1.19}, True, Verdict.INEFFECTIVE, Level.CRITICAL),
        ({"accept_length": 1.0}, True, Verdict.INEFFECTIVE, Level.CRITICAL),
        ({"accept_length": 4.0}, True, Verdict.SUSPICIOUS, Level.WARNING),
        ({"accept_length": 4.0, "verify_steps": 9}, True, Verdict.ON_AND_EFFECTIVE, Level.OK),
        ({"algorithm": None, "accept_length": None}, True, Verdict.OFF, Level.CRITICAL),
        ({"algorithm": None, "accept_length": None}, False, Verdict.OFF, Level.OK),
        ({"accept_length": None}, True, Verdict.UNKNOWN, Level.WARNING),
        ({"engine": "openai"}, True, Verdict.UNKNOWN, Level.WARNING),
        ({"engine": "llama.cpp"}, False, Verdict.UNKNOWN, Level.OK),
        ({"tok_s": 90.0, "plain_tok_s": 100.0}, True, Verdict.INEFFECTIVE, Level.CRITICAL),
        ({"tok_s": 160.0, "plain_tok_s": 100.0}, True, Verdict.ON_AND_EFFECTIVE, Level.OK),
    ],
)
def test_verdicts(facts: dict[str, object], wanted: bool, verdict: Verdict, level: Level) -> None:
    found = judge(evidence(**facts), SETTINGS, wanted)
    assert (found.verdict, found.level) == (verdict, level)
    assert found.message


def test_the_fleet_is_judged_by_its_worst_server() -> None:
    good, bad = judge(evidence(), SETTINGS, True), judge(evidence(server="s1", accept_length=1.0), SETTINGS, True)
    made = report([good, bad], SETTINGS, True)
    assert made.verdict == Verdict.INEFFECTIVE and "s1" in made.summary
    assert made.stops and made.next_steps
    assert not report([good, bad], MtpSettings(gate="monitor"), True).stops
    assert json.dumps(made.as_dict(), default=str)


def test_no_server_is_no_crash() -> None:
    assert report([], SETTINGS, True).verdict == Verdict.UNKNOWN


def replay(version: str, case: str, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server whose endpoints answer as they were recorded."""
    folder = shared(f"captures/sglang-{version}-h200/{case}")

    def recorded(name: str) -> Answer:
        if not (folder / f"{name}.json").exists():
            return Answer(404)
        value = json.loads((folder / f"{name}.json").read_text())
        return Answer(value["status"], value["body"])

    def call(url: str, body: object = None, **_: object) -> Answer:
        if url.endswith("/server_info"):
            return recorded("server_info")
        if "/v1/loads" in url:
            return recorded("v1_loads_busy")
        return recorded("chat_meta_info")

    monkeypatch.setattr("tasks.provisioning.mtp.call", call)
    return Server("s0", "http://127.0.0.1:1", "default", "sglang", version, log_path=str(folder / "server.log"))


def test_recorded_0517_with_mtp(monkeypatch: pytest.MonkeyPatch) -> None:
    server = replay("0.5.17", "tiny-mtp-eagle", monkeypatch)
    found = gather(server)
    assert (found.algorithm, found.steps, found.draft_graphs) == ("EAGLE", 3, True)
    assert found.accept_length == pytest.approx(2.444, abs=0.01)
    assert mtp_gate([server], SETTINGS).verdict == Verdict.ON_AND_EFFECTIVE


def test_recorded_0511_tells_acceptance_only_in_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    server = replay("0.5.11", "tiny-mtp-eagle", monkeypatch)
    assert gather(server).accept_length == pytest.approx(2.5125)
    assert mtp_gate([server], SETTINGS).verdict == Verdict.ON_AND_EFFECTIVE


def test_nextn_is_reported_as_eagle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gather(replay("0.5.11", "tiny-mtp-nextn", monkeypatch)).algorithm == "EAGLE"


@pytest.mark.parametrize("version", ["0.5.11", "0.5.17"])
def test_recorded_plain_servers_are_off(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = replay(version, "tiny-plain", monkeypatch)
    assert mtp_gate([server], SETTINGS, wanted=True).verdict == Verdict.OFF
    assert not mtp_gate([server], SETTINGS, wanted=False).stops


def test_a_server_that_does_not_answer_is_unknown() -> None:
    silent = Server("s0", "http://127.0.0.1:9", "m", "sglang", arguments={"speculative_algorithm": "EAGLE"})
    made = mtp_gate([silent], SETTINGS)
    assert made.verdict == Verdict.UNKNOWN and made.level is Level.WARNING


def test_another_engine_is_not_even_asked() -> None:
    made = mtp_gate([Server("s0", "http://127.0.0.1:9", "m", "openai")], SETTINGS)
    assert (made.verdict, made.stops) == (Verdict.UNKNOWN, False)


def feed(watch: AcceptWatch, length: float, start: float, seconds: int, running: int = 4) -> list[str]:
    events = [watch.observe(start + second, length, running) for second in range(seconds)]
    return [event["event"] for event in events if event]


def test_a_collapse_is_told_once_after_two_minutes_and_so_is_the_recovery() -> None:
    watch = AcceptWatch(SETTINGS)
    assert feed(watch, 2.9, 0, 300) == []
    assert feed(watch, 1.02, 300, 119) == []
    assert feed(watch, 1.02, 419, 600) == ["mtp.collapsed"]
    assert feed(watch, 2.8, 1100, 60) == ["mtp.recovered"]
    assert feed(watch, 1.0, 1200, 300) == ["mtp.collapsed"]


def test_full_acceptance_for_long_is_suspicious_and_short_dips_are_nothing() -> None:
    assert feed(AcceptWatch(SETTINGS), 4.0, 0, 400) == ["mtp.suspicious"]
    watch = AcceptWatch(SETTINGS)
    assert [feed(watch, 1.0 if minute % 2 else 2.5, minute * 60, 60) for minute in range(20)] == [[]] * 20


def test_idle_readings_do_not_count() -> None:
    assert feed(AcceptWatch(SETTINGS), 1.0, 0, 1000, running=0) == []
    assert AcceptWatch(SETTINGS).observe(0, None, 4) is None
