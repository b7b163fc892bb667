"""Public fault reports about generation, requests, resume, limits and clients, as inputs with the right result."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from paths import shared
from runs_for_tests import NO_BREAKER, check_accounts, completions, engine, failures, finish, new_run, prompts
from simulator import FaultPlan, SimFleet, SimSettings, SimTarget
from targets import qwen36
from tasks.client.answers import read_answer
from tasks.client.chat import ChatClient, ChatOutcome, ChatRequest, OutcomeKind
from tasks.errors import GateError, StorageError
from tasks.generation.conversation import next_step, to_server
from tasks.generation.journal import Journal, Kind, replay
from tasks.generation.plan import pending_ids
from tasks.generation.policy import Do, after_answer, after_failure, deadline_s
from tasks.generation.quality import Judge
from tasks.generation.reasons import Reason
from tasks.generation.settings import GenerationSettings
from tasks.records import Message, Server
from tasks.runs import RunPaths

FAST = SimSettings(median_tokens=60, sigma=0.6, speedup=200)


def case_input(folder: str) -> Any:
    return json.loads(shared(f"cases/{folder}/input.json").read_text())


def answer(body: dict[str, Any]) -> ChatOutcome:
    return read_answer(200, json.dumps(body).encode(), 0.1)


def judge(body: dict[str, Any], thinking: bool) -> Any:
    return Judge(SimTarget()).judge(answer(body), thinking=thinking)


def test_b34_length_inside_thinking() -> None:
    case = case_input("34_length_inside_thinking")
    judged = judge(case["response"]["body"], thinking=True)
    assert judged.outcome.content == ""
    assert judged.reason is Reason.TRUNCATED_IN_REASONING
    settings = GenerationSettings(on_length="retry_larger")
    limit = case["request"]["max_tokens"]
    actions = []
    for attempt in range(settings.max_attempts):
        action = after_answer(judged.reason, attempt=attempt, max_tokens=limit, room=300, settings=settings)
        actions.append((action.do, action.max_tokens))
        limit = action.max_tokens or limit
    assert actions[:2] == [(Do.RETRY, 128), (Do.RETRY, 256)]
    assert actions[-1][0] is Do.FAIL


def test_b36_reasoning_left_in_content() -> None:
    case = case_input("36_reasoning_left_in_content")
    for response in case["responses"]:
        judged = judge(response["body"], thinking=True)
        assert judged.reason is None
        assert judged.outcome.content == "17 is prime."
        assert "think>" not in (judged.outcome.reasoning_content or "")
        assert judged.outcome.reasoning_content.startswith("2 no")


def test_b38_length_counted_as_success() -> None:
    case = case_input("38_length_counted_as_success")
    judged = judge(case["response"]["body"], thinking=False)
    assert judged.reason is Reason.TRUNCATED_BY_LENGTH
    assert judged.outcome.finish_reason == "length"
    settings = GenerationSettings()
    action = after_answer(judged.reason, attempt=0, max_tokens=8, room=None, settings=settings)
    assert (action.do, action.reason) == (Do.FAIL, Reason.TRUNCATED_BY_LENGTH)


async def test_b40_enable_thinking_at_the_top_level(tmp_path: Path) -> None:
    case = case_input("40_enable_thinking_misplaced")
    paths = new_run(tmp_path, prompts(3))
    with SimFleet(1, FAST) as fleet:
        fleet.servers[0].keep_bodies = True
        await finish(engine(paths, fleet))
        for body in fleet.servers[0].bodies:
            wanted = case["good_body"]["chat_template_kwargs"]["enable_thinking"]
            assert body["chat_template_kwargs"]["enable_thinking"] is wanted
            assert "extra_body" not in body
    mismatch = judge({"choices": [_choice("a", "thought")], "usage": {}}, thinking=False)
    assert mismatch.reason is Reason.THINKING_MODE_MISMATCH


def _choice(content: str | None, reasoning: str | None) -> dict[str, Any]:
    return {"finish_reason": "stop", "message": {"content": content, "reasoning_content": reasoning}}


async def test_b41_context_overflow(tmp_path: Path) -> None:
    from tasks.records import Prompt

    case = case_input("41_context_overflow_400")
    for status in case["statuses"]:
        for text in case["server_messages"]:
            refused = read_answer(status, json.dumps({"error": {"message": text}}).encode(), 0.1)
            assert not refused.ok
    # The decision is made from a local token count, so the wording never matters.
    rows = {row["id"]: row["prompt_tokens"] for row in case["rows"]}
    fits = " ".join(["kakaka"] * (rows["fits_if_clamped"] - 10))
    never = " ".join(["kakaka"] * rows["never_fits"])
    made = [Prompt("1" * 32, (Message("user", fits),)), Prompt("2" * 32, (Message("user", never),))]
    paths = new_run(tmp_path, made)
    sim = SimSettings(median_tokens=60, sigma=0.1, speedup=200, context_tokens=case["window"])
    with SimFleet(1, sim) as fleet:
        await finish(engine(paths, fleet, sampling={"max_tokens": case["max_tokens"]}))
        assert fleet.servers[0].requests == 1  # the other was never sent, let alone retried
    turn = completions(paths)["turns"][0][0]
    assert turn["max_tokens"] < case["max_tokens"]
    assert failures(paths).row(0, named=True)["reason"] == "CONTEXT_OVERFLOW"


def test_b42_timeout_retry_storm() -> None:
    case = case_input("42_timeout_retry_storm")
    settings = GenerationSettings()
    assert deadline_s(32_768, 100, settings) > 700  # the case's server answers: it is waited for
    sent = attempt = 0
    while True:
        sent += 1
        outcome = ChatOutcome(OutcomeKind.TIMEOUT)
        action = after_failure(outcome, attempt=attempt, requeues=0, server_down=False, settings=settings)
        if action.do is Do.FAIL:
            break
        attempt += 1
    assert sent == settings.max_attempts < (case["client"]["max_retries"] + 1) * case["outer_retry"]
    assert action.reason is Reason.TIMEOUT


def test_b44_repetition_loop() -> None:
    case = case_input("44_repetition_loop")
    body = case["response"]["body"]
    assert judge(body, thinking=True).reason is Reason.DEGENERATE_REPETITION
    body["choices"][0]["finish_reason"] = "stop"
    body["choices"][0]["message"]["reasoning_content"] = "let me see"
    assert judge(body, thinking=True).reason is Reason.DEGENERATE_REPETITION
    table = "\n".join(f"{a} x {b} = {a * b}" for a in range(1, 13) for b in range(1, 13))
    control = {"choices": [_choice(table, "I write the table.")], "usage": {}}
    assert judge(control, thinking=True).reason is None


async def test_b45_retokenization_drift(tmp_path: Path) -> None:
    """The server's ids are used where offered; where not, the row says so and keeps usage to compare with."""
    case = case_input("45_retokenization_drift")
    for api, source in (("sglang", "server"), ("plain", "none")):
        paths = new_run(tmp_path / api, prompts(2))
        sim = SimSettings(median_tokens=60, speedup=200, api=api)  # type: ignore[arg-type]
        with SimFleet(1, sim) as fleet:
            await finish(engine(paths, fleet, sampling={"thinking": api == "sglang"}))
        turn = completions(paths)["turns"][0][0]
        assert turn["ids_source"] == source
        assert turn["completion_tokens"] is not None
    wrong = {"choices": [{**_choice("he", "x"), "token_ids": [1]}], "usage": case["usage"]}
    assert judge(wrong, thinking=True).reason is Reason.USAGE_MISMATCH


def test_b46_stop_token_in_content() -> None:
    judge_of_qwen = Judge(qwen36())
    lines = shared("cases/46_stop_token_in_content/input.jsonl").read_text().splitlines()
    rows = {row["id"]: row["messages"][-1]["content"] for row in map(json.loads, lines)}
    found = {
        name: judge_of_qwen.judge(answer({"choices": [_choice(text, "r")], "usage": {}}), thinking=True)
        for name, text in rows.items()
    }
    assert found["trail"].reason is None
    assert found["trail"].outcome.content == "It is four."
    assert found["trail"].notes == ("trailing_stop_removed",)
    assert found["mid"].reason is found["next"].reason is Reason.CONTROL_TOKEN_IN_CONTENT


def test_b48_tool_loop_keeps_reasoning() -> None:
    case = case_input("48_tool_loop_reasoning_dropped")
    first = answer(case["turn1_response"]["body"])
    said = Message("assistant", first.content, first.reasoning_content, first.tool_calls)
    recorded = (
        Message("user", "weather in Oslo?"),
        Message("assistant", "", None, first.tool_calls),
        Message("tool", case["tool_result"], tool_call_id="c1"),
    )
    sent = [to_server(message) for message in next_step(recorded, [said]).history]
    assert "REASON1" in sent[1]["reasoning_content"]
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"] == "c1"


def test_b50_thinking_requested_none_returned() -> None:
    case = case_input("50_thinking_requested_none_returned")
    assert judge(case["response"]["body"], thinking=True).reason is Reason.MISSING_REASONING


@pytest.fixture
async def counting() -> AsyncIterator[tuple[dict[str, int], Server]]:
    counts = {"now": 0, "peak": 0, "seen": 0}

    async def chat(request: web.Request) -> web.Response:
        await request.read()
        counts["now"] += 1
        counts["seen"] += 1
        counts["peak"] = max(counts["peak"], counts["now"])
        await asyncio.sleep(0.05)
        counts["now"] -= 1
        return web.json_response({"choices": [_choice("a", "b")], "usage": {}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    yield counts, Server("s", f"http://127.0.0.1:{port}", "m")
    await runner.cleanup()


@pytest.mark.parametrize("path", ["thin", "openai"])
async def test_b51_client_pool_cap(counting: tuple[dict[str, int], Server], path: str) -> None:
    case = case_input("51_client_pool_cap")
    counts, server = counting
    async with ChatClient(server, case["concurrency"], path) as client:  # type: ignore[arg-type]
        request = ChatRequest("r", [{"role": "user", "content": "q"}])
        # 600 rows wait for 256 slots; waiting is not charged to the deadline of one second.
        outcomes = await asyncio.gather(*(client.send(request, 5.0) for _ in range(case["rows"])))
    assert all(outcome.ok for outcome in outcomes)
    assert counts["peak"] == case["concurrency"]
    assert counts["seen"] == case["rows"]


async def test_b52_resume_by_id(tmp_path: Path) -> None:
    case = case_input("52_resume_by_line_count")
    made = sorted(prompts(len(case["input_ids"])), key=lambda prompt: prompt.prompt_id)
    letters = dict(zip(case["input_ids"], made, strict=True))
    paths = new_run(tmp_path, made)
    with SimFleet(1, FAST) as fleet:
        done = {letters[letter].messages[0].content for letter in case["written_before_crash"]}
        bad = {letters[letter].messages[0].content for letter in case["error_file"]}
        first = engine(paths, fleet, breaker=NO_BREAKER)
        journal = first._store.open(0).journal
        for row, prompt in enumerate(made):
            text = prompt.messages[0].content
            if text in done:
                journal.append(row, 0, Kind.LAST, _turn(prompt.prompt_id))
            elif text in bad:
                failed = {"prompt_id": prompt.prompt_id, "reason": "TIMEOUT", "detail": "", "attempts": 4, "turn": 0}
                journal.append(row, 0, Kind.FAILED, failed)
        journal.close()
        assert pending_ids(paths) == {letters["b"].prompt_id, letters["e"].prompt_id}
        await finish(engine(paths, fleet))
        assert fleet.servers[0].requests == 2
    good, failed_ids = check_accounts(paths, made)
    assert failed_ids == {letters["c"].prompt_id}
    assert len(good) == 4


def _turn(identifier: str) -> dict[str, Any]:
    names = ("thinking", "temperature", "top_p", "top_k")
    values = {"content": "x", "reasoning_content": "y", "completion_tokens": 3, "attempt": 0, "turn": 0}
    return {**values, "prompt_id": identifier, **dict.fromkeys(names)}


def test_b54_torn_last_line(tmp_path: Path) -> None:
    raw = shared("cases/54_torn_last_line/input.jsonl").read_bytes()
    path = tmp_path / "journal"
    journal = Journal.open(path, {"identity_digest": "x"})
    journal.append(1, 0, Kind.LAST, json.loads(raw.splitlines()[0]))
    whole = path.stat().st_size
    journal.append(2, 0, Kind.LAST, {"id": "2", "ok": True})
    journal.close()
    path.write_bytes(path.read_bytes()[: whole + len(raw.splitlines()[1])])
    again = Journal.open(path, {"identity_digest": "x"})
    assert again.cut_bytes > 0  # reported
    assert [entry.row for entry in replay(again.entries)] == [1]
    again.append(2, 0, Kind.LAST, {"id": "2", "ok": True})
    again.close()
    last = Journal.open(path, {"identity_digest": "x"})
    assert [last.load(entry) for entry in replay(last.entries)] == [{"id": "1", "ok": True}, {"id": "2", "ok": True}]
    data = bytearray(path.read_bytes())
    data[last.entries[1].offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match="record 1"):
        Journal.open(path, {"identity_digest": "x"})


async def test_b59_a_resume_adds_to_the_index(tmp_path: Path) -> None:
    case = case_input("59_index_overwritten_on_resume")
    parts = [*case["manifest_before"].values(), *case["resumed_rows"].values()]
    made = prompts(3 * 20)
    paths = new_run(tmp_path, made)
    with SimFleet(1, FAST) as fleet:
        first = engine(paths, fleet, chunk_rows=20)
        first.start()
        await first.wait_chunk(0)
        await first.wait_chunk(1)
        await first.stop()
        records = await finish(engine(paths, fleet, chunk_rows=20))
    assert [record.index for record in records] == [0, 1, 2]
    assert len(parts) == len(records)
    assert sum(record.done for record in records) == len(completions(paths)) == 60


async def test_b60_failure_never_ends_as_success(tmp_path: Path) -> None:
    case = case_input("60_warn_only_failure_exit_zero")
    made = prompts(case["rows"])
    paths = new_run(tmp_path / "a", made)
    (paths.chunks).parent.mkdir(parents=True, exist_ok=True)
    paths.chunks.write_text("not a folder")
    with SimFleet(1, FAST) as fleet, pytest.raises((StorageError, OSError)):
        engine(paths, fleet)
    plain: RunPaths = new_run(tmp_path / "b", made)
    breaker = {"window": 500, "min_answers": 100, "max_bad_share": 0.2}
    with SimFleet(1, FAST, faults=FaultPlan(rates={"empty": 1.0})) as fleet:
        running = engine(plain, fleet, breaker=breaker)
        running.start()
        with pytest.raises(GateError) as caught:
            await running.wait_chunk(0)
        await running.stop()
        assert sum(s.requests for s in fleet.servers) < 250  # early, not after 128 rows x 4 attempts
    assert caught.value.report["details"]["reasons"]["EMPTY_ANSWER"] >= 100
