"""Every way an HTTP answer can end is a typed outcome; checked on recorded answers of SGLang 0.5.17."""

import json

import pytest

from paths import shared
from tasks.client.answers import read_answer
from tasks.client.bodies import CHAT, GENERATE, chat_body, endpoint, generate_body
from tasks.client.chat import ChatRequest, OutcomeKind, Sampling
from tasks.records import Capabilities, Server

CAPTURES = "captures/sglang-0.5.17-h200/tiny-mtp-eagle"


def captured(name: str) -> tuple[int, bytes]:
    record = json.loads(shared(f"{CAPTURES}/{name}.json").read_text())
    return record["status"], json.dumps(record["body"]).encode()


def test_a_chat_answer_with_ids_is_read_exactly() -> None:
    outcome = read_answer(*captured("chat_token_ids"), 0.1)
    assert outcome.kind is OutcomeKind.OK
    assert outcome.content == "\n\nHello there! How can I help you today?"
    assert outcome.reasoning_content == "Okay, the user wants a short answer."
    assert outcome.ids_source == "server"
    assert outcome.token_ids is not None and len(outcome.token_ids) == outcome.completion_tokens == 22
    assert outcome.prompt_token_ids is not None and len(outcome.prompt_token_ids) == outcome.prompt_tokens == 13
    assert outcome.verify_ct == 9
    assert outcome.accept_length == pytest.approx(2.444, abs=1e-3)


def test_an_answer_cut_in_thinking_is_cut() -> None:
    outcome = read_answer(*captured("chat_token_ids_cut_in_thinking"), 0.1)
    assert (outcome.kind, outcome.content) == (OutcomeKind.CUT, "")


def test_an_abort_with_status_200_is_not_success() -> None:
    events = json.loads(shared(f"{CAPTURES}/abort.json").read_text())["events"]
    bodies = {event["what"]: event for event in events if "body" in event}
    chat = bodies["chat aborted"]
    assert read_answer(chat["status"], json.dumps(chat["body"]).encode(), 0.1).kind is OutcomeKind.ABORTED
    generate = bodies["generate aborted"]
    outcome = read_answer(generate["status"], json.dumps(generate["body"]).encode(), 0.1, generate=True)
    assert outcome.kind is OutcomeKind.ABORTED
    assert outcome.token_ids is not None and len(outcome.token_ids) == 59


@pytest.mark.parametrize(
    "name",
    [
        "error_context_overflow_chat",
        "error_max_tokens_overflow_chat",
        "error_context_overflow_generate",
        "error_max_tokens_overflow_generate",
    ],
)
def test_an_overflow_is_told_apart(name: str) -> None:
    assert read_answer(*captured(name), 0.1).kind is OutcomeKind.OVERFLOW


@pytest.mark.parametrize("name", ["error_bad_temperature", "error_bad_json", "error_bad_role", "error_empty_messages"])
def test_other_refusals_are_bad_requests(name: str) -> None:
    outcome = read_answer(*captured(name), 0.1)
    assert outcome.kind is OutcomeKind.BAD_REQUEST
    assert not outcome.retryable
    assert len(outcome.message) > 20


@pytest.mark.parametrize(
    ("status", "payload", "kind"),
    [
        (408, b"", OutcomeKind.RETRY_LATER),
        (429, b'{"error":{"message":"slow down"}}', OutcomeKind.RETRY_LATER),
        (503, b"", OutcomeKind.RETRY_LATER),
        (500, b"Internal Server Error", OutcomeKind.SERVER_ERROR),
        (502, b"<html>", OutcomeKind.SERVER_ERROR),
        (413, b"", OutcomeKind.OVERFLOW),
        (400, b'{"error":{"message":"x","type":"exceed_context_size_error"}}', OutcomeKind.OVERFLOW),
        (422, b'{"detail":"extra field"}', OutcomeKind.BAD_REQUEST),
        (200, b'{"choices": [{"mess', OutcomeKind.MALFORMED),
        (200, b"\x00\xff not json", OutcomeKind.MALFORMED),
        (200, b"[]", OutcomeKind.MALFORMED),
        (200, b'{"choices":[]}', OutcomeKind.MALFORMED),
        (200, b'{"choices":[{"message":{"content":3},"finish_reason":"stop"}]}', OutcomeKind.MALFORMED),
        (200, b'{"choices":[{"message":{"content":"x"},"finish_reason":null}]}', OutcomeKind.MALFORMED),
    ],
)
def test_every_ending_has_a_kind(status: int, payload: bytes, kind: OutcomeKind) -> None:
    assert read_answer(status, payload, 0.1).kind is kind


def test_reasoning_is_read_under_either_name() -> None:
    for name in ("reasoning_content", "reasoning"):
        message = {"content": "a", name: "b"}
        body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        assert read_answer(200, body, 0.1).reasoning_content == "b"


def test_ids_of_llama_cpp_come_from_logprobs_or_verbose() -> None:
    choice = {"message": {"content": "ab"}, "finish_reason": "stop"}
    with_logprobs = {"choices": [{**choice, "logprobs": {"content": [{"id": 5, "token": "a"}, {"id": 6}]}}]}
    outcome = read_answer(200, json.dumps(with_logprobs).encode(), 0.1)
    assert (outcome.token_ids, outcome.ids_source) == ([5, 6], "logprobs")
    verbose = {"choices": [choice], "__verbose": {"tokens": [7, 8]}}
    outcome = read_answer(200, json.dumps(verbose).encode(), 0.1)
    assert (outcome.token_ids, outcome.ids_source) == ([7, 8], "server")


REQUEST = ChatRequest(
    "rid-1",
    [{"role": "user", "content": "q"}],
    Sampling(temperature=1.0, top_p=0.95, top_k=20, max_tokens=9, seed=3),
    thinking=True,
    prompt_ids=[1, 2],
)


def server(engine: str, **capabilities: bool) -> Server:
    return Server("s", "http://x", "m", engine=engine, capabilities=Capabilities(**capabilities))  # type: ignore[arg-type]


def test_a_server_that_knows_nothing_extra_gets_nothing_extra() -> None:
    body = chat_body(server("openai"), REQUEST)
    assert set(body) == {"model", "messages", "max_tokens", "temperature", "top_p", "seed"}


def test_extra_fields_follow_capabilities() -> None:
    full = server("sglang", return_token_ids=True, chat_template_kwargs=True, separate_reasoning=True, abort=True)
    body = chat_body(full, REQUEST)
    assert body["chat_template_kwargs"] == {"enable_thinking": True, "preserve_thinking": False}
    assert body["rid"] == "rid-1"
    assert body["top_k"] == 20
    assert body["return_token_ids"] is body["return_meta_info"] is body["separate_reasoning"] is True
    body = chat_body(server("llama.cpp", logprob_ids=True), REQUEST)
    assert (body["verbose"], body["return_tokens"], "logprobs" in body) == (True, True, False)


def test_old_sglang_gets_token_ids_through_generate() -> None:
    old = server("sglang", generate_endpoint=True, chat_template_kwargs=True, abort=True)
    assert endpoint(old, REQUEST) == GENERATE
    body = generate_body(REQUEST)
    assert body["input_ids"] == [1, 2]
    assert body["sampling_params"]["max_new_tokens"] == 9
    assert endpoint(server("sglang", generate_endpoint=True, return_token_ids=True), REQUEST) == CHAT
    assert endpoint(old, ChatRequest("r", [])) == CHAT
