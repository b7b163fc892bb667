"""Bar 3: client CPU a request at 1024 in flight with 48 kB prompts, against bare aiohttp in the same run.

Bar: the path the engine uses by default <= 3 x bare aiohttp (the openai path is reported beside it), and 2048 in flight
without a stalled slot (every slot is refilled at once: wall time against rounds x the server's delay).

The server (aiohttp, answers after a fixed delay) is a process of its own; CPU is this process's, divided by requests.
Bare aiohttp here is `session.post(url, json=body)` with the standard json module, and `await answer.json()`; the same
with orjson bytes is reported too. Rounds alternate, medians are compared.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

import aiohttp  # noqa: E402
import orjson  # noqa: E402
from aiohttp import web  # noqa: E402

from tasks.client.bodies import CHAT, chat_body  # noqa: E402
from tasks.client.chat import ChatClient, ChatRequest, Sampling  # noqa: E402
from tasks.records import Capabilities, Server  # noqa: E402

PROMPT_BYTES = 48_000
CAPABILITIES = Capabilities(
    return_token_ids=True, chat_template_kwargs=True, separate_reasoning=True, abort=True, loads=True
)


async def serve(delay_s: float) -> None:
    """Answers like SGLang 0.5.17 with 600 token ids; tells the most requests it held at once."""
    answer = {
        "id": "x",
        "choices": [
            {
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "word " * 300, "reasoning_content": "word " * 300},
                "token_ids": list(range(10_000, 10_600)),
                "prompt_token_ids": list(range(1000, 1100)),
                "meta_info": {"spec_verify_ct": 200, "spec_accept_length": 3.0},
            }
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 600},
    }
    payload = orjson.dumps(answer)
    counts = {"now": 0, "peak": 0}

    async def chat(request: web.Request) -> web.Response:
        await request.read()
        counts["now"] += 1
        counts["peak"] = max(counts["peak"], counts["now"])
        await asyncio.sleep(delay_s)
        counts["now"] -= 1
        return web.Response(body=payload, content_type="application/json")

    async def peak(request: web.Request) -> web.Response:
        found, counts["peak"] = counts["peak"], 0
        return web.json_response(found)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post(CHAT, chat)
    app.router.add_get("/peak", peak)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=8192)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)  # type: ignore[union-attr]
    await asyncio.Event().wait()


def request(index: int) -> ChatRequest:
    text = (f"{index:08d} " + "lorem ipsum " * (PROMPT_BYTES // 12))[:PROMPT_BYTES]
    return ChatRequest(f"{index:032x}", [{"role": "user", "content": text}], Sampling(1.0, 0.95, 20), thinking=True)


async def workers(count: int, in_flight: int, send: Callable[[int], Awaitable[Any]]) -> tuple[float, float]:
    """(CPU seconds, wall seconds) for `count` requests with `in_flight` workers."""
    indices = iter(range(count))

    async def work() -> None:
        for index in indices:
            await send(index)

    cpu, wall = time.process_time(), time.monotonic()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    return time.process_time() - cpu, time.monotonic() - wall


async def run_path(path: str, server: Server, count: int, in_flight: int) -> tuple[float, float]:
    if path in ("openai", "thin", "auto"):
        async with ChatClient(server, in_flight, path) as client:  # type: ignore[arg-type]

            async def ours(index: int) -> None:
                outcome = await client.send(request(index), 600)
                assert outcome.ok and outcome.completion_tokens == 600, outcome

            return await workers(count, in_flight, ours)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.base_url, connector=connector) as session:

        async def bare(index: int) -> None:
            body = chat_body(server, request(index))
            if path == "bare aiohttp":
                async with session.post(CHAT, json=body) as answer:
                    assert (await answer.json())["usage"]
            else:
                headers = {"Content-Type": "application/json"}
                async with session.post(CHAT, data=orjson.dumps(body), headers=headers) as answer:
                    assert orjson.loads(await answer.read())["usage"]

        return await workers(count, in_flight, bare)


def start_server(delay_s: float) -> tuple[subprocess.Popen[str], Server]:
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(delay_s)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    return process, Server("s", f"http://127.0.0.1:{port}", "m", "sglang", "0.5.17", capabilities=CAPABILITIES)


async def _peak(server: Server) -> int:
    async with aiohttp.ClientSession(server.base_url) as session, session.get("/peak") as answer:
        return int(await answer.json())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve))
        return
    in_flight, count, rounds, delay = (128, 384, 1, 0.3) if arguments.small else (1024, 2048, 3, 2.0)
    process, server = start_server(delay)
    paths = ("bare aiohttp", "bare aiohttp, orjson", "thin", "openai")
    cpu: dict[str, list[float]] = {path: [] for path in paths}
    try:
        for _ in range(rounds):
            for path in paths:
                seconds, _ = asyncio.run(run_path(path, server, count, in_flight))
                cpu[path].append(1000 * seconds / count)
        asyncio.run(_peak(server))
    finally:
        process.kill()
    many = in_flight * 2
    process, server = start_server(4 * delay)
    try:
        _, wall = asyncio.run(run_path("auto", server, many * 3, many))
        peak = asyncio.run(_peak(server))
    finally:
        process.kill()
    medians = {path: statistics.median(values) for path, values in cpu.items()}
    base = medians["bare aiohttp"]
    strict = medians["bare aiohttp, orjson"]
    print(f"{'path':22s} {'CPU ms/request':>15s} {'x bare':>7s} {'x bare orjson':>14s}")
    for path, value in medians.items():
        print(f"{path:22s} {value:15.3f} {value / base:7.2f} {value / strict:14.2f}")
    share = 3 * 4 * delay / wall
    print(
        f"{many} in flight, 3 rounds of {4 * delay:g} s: wall {wall:.2f} s, most held at once {peak}, {share:.1%} busy"
    )
    summary = {
        "benchmark": "client",
        "in_flight": in_flight,
        "prompt_bytes": PROMPT_BYTES,
        "cpu_ms": medians,
        "ratio": medians["thin"] / base,
        "ratio_to_orjson": medians["thin"] / strict,
        "openai_ratio": medians["openai"] / base,
        "peak": peak,
        "bar_3": medians["thin"] / strict <= 3 and peak == many,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
