"""Whole small runs: faults, stops, resumes, servers that come and go."""

import asyncio
import json
import time
from pathlib import Path

import polars as pl
import pytest

from runs_for_tests import check_accounts, completions, drain, engine, failures, finish, new_run, prompts
from simulator import Fault, FaultPlan, SimFleet, SimSettings
from simulator.faults import REQUEST_FAULTS
from tasks.errors import GateError, ServerError, SpecError
from tasks.generation.engine import EngineStopped
from tasks.generation.journal import Kind
from tasks.generation.plan import done_ids, ledger, pending_ids

FAST = SimSettings(median_tokens=60, sigma=0.7, speedup=200)
SLOW = SimSettings(median_tokens=60, sigma=0.7, speedup=4)


@pytest.mark.parametrize("fault", REQUEST_FAULTS)
async def test_a_faulty_answer_is_asked_again(tmp_path: Path, fault: str) -> None:
    made = prompts(40)
    paths = new_run(tmp_path, made)
    with SimFleet(2, FAST, faults=FaultPlan(rates={fault: 0.25})) as fleet:  # type: ignore[dict-item]
        await finish(engine(paths, fleet))
    _, failed = check_accounts(paths, made)
    if fault != "cut":  # rejected at once under the default policy
        assert not failed


async def test_a_stop_keeps_what_is_finished_and_a_resume_asks_only_for_the_rest(tmp_path: Path) -> None:
    made = prompts(80)
    paths = new_run(tmp_path, made)
    with SimFleet(2, SLOW) as fleet:
        first = engine(paths, fleet, limits=8)
        first.start()
        waiting = asyncio.create_task(drain(first))
        await asyncio.sleep(0.5)
        begun = time.monotonic()
        await first.stop("cancelled")
        assert time.monotonic() - begun < 5
        with pytest.raises(EngineStopped, match="cancelled"):
            await waiting
        aborted = sum(len(server.aborted) for server in fleet.servers)
        books = ledger(paths)
        assert books.done and books.pending and not books.failed
        assert not any(e.kind is Kind.ATTEMPT for e in first._store.open(0).journal.entries)  # an abort is no attempt
        assert aborted >= 8
        before = dict(fleet.answered())
        await finish(engine(paths, fleet, limits=8))
        asked_twice = [rid for rid, count in fleet.answered().items() if count > 1]
    assert not asked_twice  # what was aborted had not been answered; what was answered is not asked again
    assert len(before) == len(books.done)
    check_accounts(paths, made)
    assert done_ids(paths) == {p.prompt_id for p in made}
    assert pending_ids(paths) == frozenset()


async def test_another_spec_is_refused_on_resume(tmp_path: Path) -> None:
    paths = new_run(tmp_path, prompts(30))
    with SimFleet(1, SLOW) as fleet:
        first = engine(paths, fleet)
        first.start()
        await asyncio.sleep(0.2)
        await first.stop()
        second = engine(paths, fleet, sampling={"temperature": 0.3})
        second.start()
        with pytest.raises(SpecError, match=r"sampling\.temperature"):
            await second.wait_chunk(0)
        await second.stop()


@pytest.mark.parametrize("kind", ["crash", "hang", "wedge"])
async def test_a_lost_server_is_ejected_its_work_moves_and_it_comes_back(tmp_path: Path, kind: str) -> None:
    made = prompts(150)
    paths = new_run(tmp_path, made)
    with SimFleet(2, SLOW) as fleet:
        running = engine(paths, fleet, limits=8, stall_s=0.6, sample_s=0.1)
        running.start()
        work = asyncio.create_task(drain(running))
        await asyncio.sleep(0.3)
        fleet.inject(0, Fault(kind, lasts_s=1.5))  # type: ignore[arg-type]
        states = set()
        while not work.done():
            states.add(running.progress().servers["sim0"])
            await asyncio.sleep(0.02)
        await work
        assert "down" in states
        assert running.progress().servers["sim1"] == "up"
        finished_after = fleet.servers[0].finished
        await running.stop()
    check_accounts(paths, made)
    assert finished_after > 10
    assert failures(paths).is_empty()


async def test_server_events_from_another_thread(tmp_path: Path) -> None:
    made = prompts(120)
    paths = new_run(tmp_path, made)
    with SimFleet(3, SLOW) as fleet:
        running = engine(paths, fleet, limits=6, probe_s=30.0)
        running.start()
        work = asyncio.create_task(drain(running))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(running.server_down, "sim1", "supervisor: exit -9")
        await asyncio.to_thread(running.remove_server, "sim2")
        await asyncio.sleep(0.3)
        assert running.servers() == ["sim0"]
        assert fleet.servers[1].batch.running == 0  # aborted there, asked elsewhere
        await asyncio.to_thread(running.server_up, "sim1")
        await asyncio.sleep(0.2)
        assert running.servers() == ["sim0", "sim1"]
        await asyncio.to_thread(running.add_server, fleet.records()[2], 6)
        await work
        await running.stop()
    check_accounts(paths, made)


async def test_no_server_left_is_an_error_that_names_why(tmp_path: Path) -> None:
    paths = new_run(tmp_path, prompts(30))
    with SimFleet(1, SLOW) as fleet:
        running = engine(paths, fleet, no_server_s=0.5)
        running.start()
        work = asyncio.create_task(drain(running))
        await asyncio.sleep(0.2)
        fleet.inject(0, Fault("crash"))
        with pytest.raises(ServerError, match="sim0: a connection broke"):
            await work
        fleet.heal(0)
        running.retry_chunk(0)
        await drain(running)
        await running.stop()


async def test_the_breaker_stops_a_run_whose_answers_do_not_think(tmp_path: Path) -> None:
    made = prompts(1000)
    paths = new_run(tmp_path, made)
    breaker = {"window": 500, "min_answers": 100, "max_bad_share": 0.2}
    with SimFleet(2, FAST, faults=FaultPlan(rates={"no_thinking": 0.87})) as fleet:
        running = engine(paths, fleet, chunk_rows=200, breaker=breaker)
        running.start()
        with pytest.raises(GateError, match="MISSING_REASONING") as caught:
            await drain(running)
        answers = sum(server.finished for server in fleet.servers)
        await running.stop()
    assert answers <= 500
    assert caught.value.report["verdict"] == "OVER_BUDGET"
    assert caught.value.report["details"]["servers"]


async def test_a_run_without_a_good_row_never_completes(tmp_path: Path) -> None:
    paths = new_run(tmp_path, prompts(5))
    breaker = {"mode": "enforce", "window": 500, "min_answers": 100, "max_bad_share": 0.5}
    with SimFleet(1, FAST, faults=FaultPlan(rates={"empty": 1.0})) as fleet:
        running = engine(paths, fleet, breaker=breaker)
        running.start()
        with pytest.raises(GateError, match="none of its 5 prompts"):
            await running.wait_chunk(0)
        await running.stop()


async def test_terminal_failures_run_again_only_when_asked(tmp_path: Path) -> None:
    made = prompts(60)
    paths = new_run(tmp_path, made)
    with SimFleet(1, FAST, faults=FaultPlan(always={"question 1": "garbage"})) as fleet:
        await finish(engine(paths, fleet, chunk_rows=20))
        _, failed = check_accounts(paths, made)
        assert len(failed) == 11
        row = failures(paths).row(0, named=True)
        assert (row["reason"], row["attempts"]) == ("MALFORMED", 4)
        assert [a["reason"] for a in json.loads(row["ledger"])] == ["MALFORMED"] * 4
        requests = fleet.servers[0].requests
        await finish(engine(paths, fleet, chunk_rows=20))
        assert fleet.servers[0].requests == requests  # nothing was asked again
    with SimFleet(1, FAST) as healed:
        await finish(engine(paths, healed, chunk_rows=20, retry_failed=True))
        assert healed.servers[0].requests == 11
    done, failed = check_accounts(paths, made)
    assert (len(done), len(failed)) == (60, 0)
    again = completions(paths).filter(pl.col("attempts") > 1)
    assert len(again) == 11


async def test_cut_answers_by_policy(tmp_path: Path) -> None:
    made = prompts(30)
    sim = SimSettings(median_tokens=100, sigma=0.1, speedup=200)
    for policy, expected in (("reject", 0), ("keep_prefix", 30), ("retry_larger", 30)):
        paths = new_run(tmp_path / policy, made)
        with SimFleet(1, sim) as fleet:
            await finish(engine(paths, fleet, on_length=policy, sampling={"max_tokens": 60}))
        done, _ = check_accounts(paths, made)
        assert len(done) == expected
        if policy == "retry_larger":
            turn = completions(paths)["turns"][0][0]
            assert (turn["finish_reason"], turn["max_tokens"]) == ("stop", 120)
            ledger_lines = json.loads(completions(paths)["ledger"][0])
            assert (ledger_lines[0]["max_tokens"], ledger_lines[0]["next_max_tokens"]) == (60, 120)
        if policy == "keep_prefix":
            assert completions(paths)["turns"][0][0]["finish_reason"] == "length"


@pytest.mark.parametrize("api", ["sglang-old", "plain"])
async def test_older_and_plain_servers_work(tmp_path: Path, api: str) -> None:
    made = prompts(40)
    paths = new_run(tmp_path, made)
    sim = SimSettings(median_tokens=60, sigma=0.7, speedup=200, api=api)  # type: ignore[arg-type]
    with SimFleet(1, sim) as fleet:
        fleet.servers[0].keep_bodies = True
        await finish(engine(paths, fleet, sampling={"thinking": api != "plain"}))
        body = fleet.servers[0].bodies[0]
    done, _ = check_accounts(paths, made)
    assert len(done) == 40
    turn = completions(paths)["turns"][0][0]
    if api == "plain":
        assert set(body) <= {"model", "messages", "max_tokens", "temperature", "top_p", "seed"}
        assert (turn["ids_source"], turn["token_ids"]) == ("none", None)
    else:
        assert body["input_ids"] == turn["prompt_token_ids"]
        assert body["require_reasoning"] is True
        assert turn["ids_source"] == "server"
        assert turn["reasoning_content"] and turn["content"]


def tool_call(city: str) -> str:
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    return json.dumps([{"id": "old", "type": "function", "function": function}])


TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])
