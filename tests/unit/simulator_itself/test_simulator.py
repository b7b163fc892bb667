"""The simulator does what it says: deterministic, labelled, with limits, queue, retraction and a heartbeat."""

import asyncio
import math
import statistics
import time
from typing import Any

import aiohttp
import pytest

from simulator import Fault, SimFleet, SimServer, SimSettings
from simulator.writer import draw_length, request_rng
from tasks.client.capabilities import detect
from tasks.client.chat import ChatClient, ChatRequest, OutcomeKind, Sampling
from tasks.client.metrics import read_service_sample


def ask(text: str, rid: str = "r", seed: int = 1, max_tokens: int = 4096) -> ChatRequest:
    message = [{"role": "user", "content": text}]
    return ChatRequest(rid, message, Sampling(1.0, max_tokens=max_tokens, seed=seed), thinking=True)


async def test_answers_depend_on_prompt_and_seed_only() -> None:
    async def answers(port_seed: int) -> list[Any]:
        async with SimServer(SimSettings(speedup=500)) as server, ChatClient(server.record(), 8) as client:
            return [(await client.send(ask("q", f"{port_seed}", seed), 10)).token_ids for seed in (1, 1, 2)]

    first, second = await answers(1), await answers(2)
    assert first == second
    assert first[0] == first[1] != first[2]


async def test_it_says_everywhere_that_it_is_a_simulator() -> None:
    async with SimServer(SimSettings(speedup=500)) as server, aiohttp.ClientSession(server.url) as session:
        for path in ("/server_info", "/model_info", "/v1/loads"):
            async with session.get(path) as answer:
                assert (await answer.json())["simulator"] is True
                assert answer.headers["X-Simulator"] == "1"
        async with session.get("/metrics") as answer:
            assert (await answer.text()).startswith("# simulator")
        assert server.record().version.endswith("+simulator")
        assert server.record().model.startswith("simulator/")


def test_detection_finds_what_it_can_do() -> None:
    for api, ids in (("sglang", True), ("sglang-old", False)):
        with SimFleet(1, SimSettings(api=api)) as fleet:  # type: ignore[arg-type]
            engine, version, can, info = detect(fleet.servers[0].url)
            assert (engine, can.return_token_ids, can.generate_endpoint) == ("sglang", ids, True)
            assert info["simulator"] and "simulator" in version
    with SimFleet(1, SimSettings(api="plain")) as fleet:
        engine, _, can, _ = detect(fleet.servers[0].url)
        assert engine == "openai"
        assert not can.return_token_ids


def test_lengths_are_log_normal() -> None:
    settings = SimSettings(median_tokens=200, sigma=1.0, min_tokens=1, max_tokens=10**9)
    logs = [math.log(draw_length(settings, request_rng(settings, f"p{i}", i))) for i in range(4000)]
    assert statistics.median(logs) == pytest.approx(math.log(200), abs=0.05)
    assert statistics.stdev(logs) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("saturation", "expected"), [(math.inf, 8 * 1000), (8.0, 4 * 1000)])
async def test_throughput_follows_the_curve(saturation: float, expected: float) -> None:
    settings = SimSettings(
        median_tokens=500, sigma=0.01, request_tok_s=100, speedup=10, saturation=saturation, max_running=8
    )
    async with SimServer(settings) as server, ChatClient(server.record(), 8) as client:
        begun = time.monotonic()
        outcomes = await asyncio.gather(*(client.send(ask(f"q{i}", f"{i}"), 30) for i in range(16)))
        tokens = sum(outcome.completion_tokens or 0 for outcome in outcomes)
        assert tokens / (time.monotonic() - begun) == pytest.approx(expected, rel=0.2)
        assert server.peak == 8


async def test_a_full_server_queues_and_a_full_kv_pool_retracts() -> None:
    settings = SimSettings(median_tokens=400, sigma=0.01, speedup=20, max_running=6, kv_tokens=1500)
    async with SimServer(settings) as server, ChatClient(server.record(), 32) as client:
        work = [asyncio.create_task(client.send(ask(f"q{i}", f"{i}"), 30)) for i in range(12)]
        await asyncio.sleep(0.1)
        sample = await read_service_sample(server.record())
        assert 0 < (sample.running or 0) <= 6
        assert (sample.queued or 0) >= 6
        assert all(outcome.ok for outcome in await asyncio.gather(*work))
        after = await read_service_sample(server.record())
        assert (after.retracted_total or 0) > 0
        assert after.generated_tokens_total == pytest.approx(12 * 400, rel=0.1)


async def test_a_hang_stops_the_heartbeat_and_a_wedge_does_not() -> None:
    settings = SimSettings(median_tokens=2000, sigma=0.01, speedup=5, max_running=4)
    async with SimServer(settings) as server, ChatClient(server.record(), 4) as client:
        work = asyncio.create_task(client.send(ask("q"), 30))
        await asyncio.sleep(0.2)
        busy = server.power_w()
        for kind, old in (("hang", True), ("wedge", False)):
            server.inject(Fault(kind))  # type: ignore[arg-type]
            await asyncio.sleep(0.3)
            sample = await read_service_sample(server.record())
            assert ((sample.heartbeat_age_s or 0) > 0.25) is old
            assert sample.running == 1
            assert server.power_w() == 124.0 < busy
            server.heal()
        assert not work.done()
        await client.abort("r")
        assert (await work).kind is OutcomeKind.ABORTED


async def test_a_stream_tells_the_time_to_the_first_token() -> None:
    settings = SimSettings(median_tokens=200, sigma=0.01, speedup=10)
    async with SimServer(settings) as server, ChatClient(server.record(), 4) as client:
        outcome = await client.stream(ask("q"), 10)
    assert outcome.ok
    assert outcome.ttft_s is not None and outcome.ttft_s < outcome.latency_s
    assert outcome.completion_tokens and outcome.content
