"""More runs of the engine: how they end, stop and go on."""

import asyncio
import json
from pathlib import Path

import polars as pl
import pytest

from runs_for_tests import NO_BREAKER, check_accounts, completions, drain, engine, failures, finish, new_run, prompts
from simulator import SimFleet, SimSettings
from tasks.errors import SpecError, StorageError
from tasks.records import Message, Prompt

FAST = SimSettings(median_tokens=60, sigma=0.7, speedup=200)
SLOW = SimSettings(median_tokens=60, sigma=0.7, speedup=4)


def tool_call(city: str) -> str:
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    return json.dumps([{"id": "old", "type": "function", "function": function}])


TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])


async def test_conversations_are_regenerated_turn_by_turn(tmp_path: Path) -> None:
    turns = (Message("user", "first"), Message("assistant", ""), Message("user", "second"))
    loop = (
        Message("user", "call the same tool"),
        Message("assistant", "", None, tool_call("Oslo")),
        Message("tool", "3 C", tool_call_id="old"),
    )
    other = (
        Message("user", "call any tool"),
        Message("assistant", "", None, tool_call("Oslo")),
        Message("tool", "3 C", tool_call_id="old"),
    )
    made = [Prompt("a" * 32, turns), Prompt("b" * 32, loop, TOOLS), Prompt("c" * 32, other, TOOLS)]
    paths = new_run(tmp_path, made)
    with SimFleet(1, FAST) as fleet:
        fleet.servers[0].keep_bodies = True
        await finish(engine(paths, fleet))
        bodies = fleet.servers[0].bodies
    table = {row["prompt_id"][0]: row for row in completions(paths).iter_rows(named=True)}
    assert [len(table[k]["turns"]) for k in "abc"] == [2, 2, 1]
    assert [m["role"] for m in table["a"]["messages"]] == ["user", "assistant", "user", "assistant"]
    assert [m["role"] for m in table["b"]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert table["c"]["cut_reason"] == "TOOL_CALLS_DIFFER"
    second = next(b for b in bodies if b["messages"][-1]["role"] == "tool")
    assert second["tools"] == json.loads(TOOLS)
    asked = second["messages"][1]
    assert asked["reasoning_content"] == table["b"]["turns"][0]["reasoning_content"]
    assert second["messages"][2]["tool_call_id"] == asked["tool_calls"][0]["id"] != "old"


async def test_a_conversation_resumes_at_its_turn(tmp_path: Path) -> None:
    conversation = tuple(
        message for i in range(6) for message in (Message("user", f"turn {i}"), Message("assistant", ""))
    )[:-1]
    made = [Prompt(f"{i:032x}", (Message("user", f"n{i}"), Message("assistant", ""), *conversation)) for i in range(8)]
    paths = new_run(tmp_path, made)
    with SimFleet(1, SLOW) as fleet:
        first = engine(paths, fleet, limits=4)
        first.start()
        await asyncio.sleep(0.8)
        await first.stop()
        answered = len(fleet.answered())
        assert answered > 4
        await finish(engine(paths, fleet, limits=4))
        assert all(count == 1 for count in fleet.answered().values())
    assert all(len(row) == 7 for row in completions(paths)["turns"])


async def test_bad_prompts_and_overflows_are_never_sent(tmp_path: Path) -> None:
    long = " ".join(f"word{i}" for i in range(3000))
    made = [
        *prompts(5),
        Prompt("d" * 32, (Message("user", "x"),), tools="{not json"),
        Prompt("e" * 32, (Message("user", long),)),
        Prompt("f" * 32, (Message("user", long[:5000]),)),
    ]
    paths = new_run(tmp_path, made)
    sim = SimSettings(median_tokens=40, sigma=0.2, speedup=200, context_tokens=8000)
    with SimFleet(1, sim) as fleet:
        fleet.servers[0].keep_bodies = True
        await finish(engine(paths, fleet, sampling={"max_tokens": 7000}))
        bodies = fleet.servers[0].bodies
    assert len(bodies) == 6
    reasons = dict(failures(paths).select("prompt_id", "reason").iter_rows())
    assert reasons == {"d" * 32: "BAD_PROMPT", "e" * 32: "CONTEXT_OVERFLOW"}
    clamped = completions(paths).filter(pl.col("prompt_id") == "f" * 32)["turns"][0][0]["max_tokens"]
    assert 1 < clamped < 7000


async def test_a_full_disk_stops_the_run_and_a_retry_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.generation import writer

    made = prompts(40)
    paths = new_run(tmp_path, made)
    real, calls = writer._write, []

    def full(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "_write", full)
    with SimFleet(1, FAST) as fleet:
        running = engine(paths, fleet, chunk_rows=100)
        running.start()
        with pytest.raises(StorageError, match="No space left"):
            await running.wait_chunk(0)
        running.retry_chunk(0)
        assert (await running.wait_chunk(0)).done == 40
        await running.stop()
        assert fleet.servers[0].requests == 40
    check_accounts(paths, made)


async def test_a_folder_that_cannot_be_written_fails_at_once(tmp_path: Path) -> None:
    paths = new_run(tmp_path, prompts(10))
    with SimFleet(1, FAST) as fleet:
        running = engine(paths, fleet)
        (paths.chunk(0)).write_text("a file where the folder should be")
        running.start()
        with pytest.raises(StorageError, match="cannot open"):
            await running.wait_chunk(0)
        await running.stop()
        assert fleet.servers[0].requests == 0


async def test_downstream_that_stalls_holds_generation_back(tmp_path: Path) -> None:
    made = prompts(400)
    paths = new_run(tmp_path, made)
    with SimFleet(1, FAST) as fleet:
        running = engine(paths, fleet, chunk_rows=20, open_chunks=2)
        running.start()
        await running.wait_chunk(1)
        await asyncio.sleep(0.5)
        stalled = running.progress().done
        assert stalled < 300
        for index in running.chunk_indices:
            await running.wait_chunk(index)
            running.release_chunk(index)
        await running.stop()
    check_accounts(paths, made)


async def test_the_load_driver_measures_what_the_server_makes(tmp_path: Path) -> None:
    paths = new_run(tmp_path, prompts(3000))
    sim = SimSettings(median_tokens=60, sigma=0.5, max_running=64, request_tok_s=100, speedup=5)
    with SimFleet(1, sim) as fleet:
        running = engine(paths, fleet, limits=4, chunk_rows=3000, open_chunks=3, breaker=NO_BREAKER)
        running.start()
        assert running.servers() == ["sim0"]
        for limit in (4, 16):
            running.set_limit("sim0", limit)
            window = await running.window("sim0", 1.0, 3.0)
            assert window.concurrency == limit
            assert not window.starved
            assert window.tok_s == pytest.approx(limit * 500, rel=0.15)
            assert window.mean_running == pytest.approx(limit, rel=0.15)
            assert window.accept_length == pytest.approx(2.9)
        observed, censored = running.lengths()
        assert len(observed) > 20 and len(censored) == 16
        await running.stop()


async def test_a_pool_that_runs_dry_is_told(tmp_path: Path) -> None:
    paths = new_run(tmp_path, prompts(6))
    sim = SimSettings(median_tokens=4000, sigma=0.01, speedup=5)
    with SimFleet(1, sim) as fleet:
        running = engine(paths, fleet, limits=16)
        running.start()
        window = await running.window("sim0", 0.5, 1.0)
        assert window.starved
        await running.stop()


async def test_prompts_that_changed_under_a_run_are_refused(tmp_path: Path) -> None:
    paths = new_run(tmp_path, prompts(30))
    with SimFleet(1, FAST) as fleet:
        await finish(engine(paths, fleet))
        new_run(tmp_path, prompts(30, "another question"))
        with pytest.raises(SpecError, match="changed under an unfinished run"):
            engine(paths, fleet)


async def test_text_that_is_no_unicode_fails_its_row_only(tmp_path: Path) -> None:
    from tasks.client.chat import ChatClient, ChatRequest, OutcomeKind

    with SimFleet(1, FAST) as fleet:
        for path in ("thin", "openai"):
            async with ChatClient(fleet.records()[0], 4, path) as client:  # type: ignore[arg-type]
                request = ChatRequest("r", [{"role": "user", "content": "a\ud800b"}])
                assert (await client.send(request, 5)).kind is OutcomeKind.BAD_REQUEST


async def test_a_job_whose_task_was_cancelled_before_its_first_step_is_not_lost(tmp_path: Path) -> None:
    made = prompts(40)
    paths = new_run(tmp_path, made)
    with SimFleet(1, FAST) as fleet:
        running = engine(paths, fleet, limits=8)
        core_pump = None

        def eject_at_once() -> None:
            core = running._core
            assert core is not None and core_pump is not None
            core_pump()  # tasks are created here and have not run yet
            core.health.eject(core.lines["sim0"], "test")

        running.pause()
        running.start()
        running.pause()
        assert running._core is not None
        await asyncio.sleep(0.3)
        core_pump = running._core.pump
        running._core.paused = False
        running._post(eject_at_once)
        async with asyncio.timeout(20):
            await drain(running)
        await running.stop()
    check_accounts(paths, made)
