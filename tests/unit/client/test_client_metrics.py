"""Counters of real servers are read into one record."""

import json

import pytest

from paths import shared
from tasks.client.capabilities import sglang_capabilities, version_tuple
from tasks.client.metrics import from_counters, parse_counters, parse_loads

CAPTURES = "captures/sglang-0.5.17-h200/tiny-mtp-eagle"


def test_metrics_of_a_busy_server() -> None:
    fields = from_counters(parse_counters(shared(f"{CAPTURES}/metrics_busy.txt").read_text()))
    assert fields["running"] == 48
    assert fields["queued"] == 0
    # The live decode counter, not the one that moves only when a request ends (402).
    assert fields["generated_tokens_total"] == 20114
    assert fields["prompt_tokens_total"] == 307
    assert fields["accept_length"] == pytest.approx(3.075)


def test_loads_of_a_busy_server() -> None:
    body = json.loads(shared(f"{CAPTURES}/v1_loads_busy.json").read_text())["body"]
    fields = parse_loads(body)
    assert fields["running"] == 48
    assert fields["heartbeat_age_s"] == pytest.approx(0.055, abs=0.01)
    assert fields["accept_length"] == pytest.approx(2.91, abs=0.01)


def test_llama_cpp_counters() -> None:
    text = (
        "# TYPE llamacpp:tokens_predicted_total counter\nllamacpp:tokens_predicted_total 120\n"
        "# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 3\n"
        "# TYPE llamacpp:requests_deferred gauge\nllamacpp:requests_deferred 1\n"
    )
    fields = from_counters(parse_counters(text))
    assert (fields["generated_tokens_total"], fields["running"], fields["queued"]) == (120, 3, 1)


def test_garbage_is_no_reading() -> None:
    assert from_counters(parse_counters("<html>not metrics</html>")) == {}
    assert parse_loads({}) == {}


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.5.17", True), ("0.5.16", False), ("0.5.23.post1", True), ("0.6.0", True), ("0.5.11", False), ("dev", True)],
)
def test_token_ids_on_chat_by_version(version: str, expected: bool) -> None:
    assert sglang_capabilities(version, {}).return_token_ids is expected


def test_versions() -> None:
    assert version_tuple("0.5.17.post1") == (0, 5, 17)
    assert version_tuple("nightly") == ()
