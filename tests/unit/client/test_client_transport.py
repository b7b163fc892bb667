"""Both HTTP paths against a scripted server: the same endings, one request each, no retry."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tasks.client.chat import ChatClient, ChatRequest, OutcomeKind
from tasks.records import Capabilities, Server

GOOD = {
    "choices": [{"message": {"role": "assistant", "content": "four", "reasoning": "2+2"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4},
}


class Script:
    """Answers by the user's text; counts what arrives and how many are inside at once."""

    def __init__(self) -> None:
        self.seen: list[dict] = []
        self.aborted: list[str] = []
        self.now = self.peak = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            return await self.answer(request, body["messages"][-1]["content"])
        finally:
            self.now -= 1

    async def answer(self, request: web.Request, text: str) -> web.StreamResponse:
        if text == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if text == "short":
            answer = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
            await answer.prepare(request)
            await answer.write(b'{"choices": [{')
            assert request.transport is not None
            request.transport.abort()
            return answer
        if text.startswith("status "):
            return web.Response(status=int(text.split()[1]), text="no", headers={"Retry-After": "2"})
        await asyncio.sleep(30 if text == "hang" else 0.02)
        return web.json_response(GOOD)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[Script, Server]]:
    script = Script()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", script.chat)
    app.router.add_post("/abort_request", script.abort)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    yield script, Server("s", f"http://127.0.0.1:{port}", "m", capabilities=Capabilities(abort=True))
    await runner.cleanup()


def ask(text: str) -> ChatRequest:
    return ChatRequest("r", [{"role": "user", "content": text}])


@pytest.mark.parametrize("path", ["thin", "openai"])
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("fine", OutcomeKind.OK),
        ("reset", OutcomeKind.CONNECTION),
        ("short", OutcomeKind.CONNECTION),
        ("hang", OutcomeKind.TIMEOUT),
        ("status 429", OutcomeKind.RETRY_LATER),
        ("status 408", OutcomeKind.RETRY_LATER),
        ("status 500", OutcomeKind.SERVER_ERROR),
        ("status 404", OutcomeKind.BAD_REQUEST),
    ],
)
async def test_endings(scripted: tuple[Script, Server], path: str, text: str, kind: OutcomeKind) -> None:
    script, server = scripted
    async with ChatClient(server, 4, path) as client:  # type: ignore[arg-type]
        outcome = await client.send(ask(text), 0.5)
    assert outcome.kind is kind, outcome
    assert len(script.seen) == 1  # nothing but the caller retries
    if kind is OutcomeKind.OK:
        assert (outcome.content, outcome.reasoning_content, outcome.completion_tokens) == ("four", "2+2", 4)
    if kind is OutcomeKind.RETRY_LATER:
        assert outcome.retry_after_s == 2.0


async def test_nobody_there() -> None:
    server = Server("s", "http://127.0.0.1:9", "m")
    for path in ("thin", "openai"):
        async with ChatClient(server, 4, path) as client:  # type: ignore[arg-type]
            assert (await client.send(ask("x"), 2.0)).kind is OutcomeKind.CONNECTION


async def test_abort_names_the_request(scripted: tuple[Script, Server]) -> None:
    script, server = scripted
    async with ChatClient(server, 4) as client:
        await client.abort("r-9")
    assert script.aborted == ["r-9"]


@pytest.mark.parametrize("path", ["thin", "openai"])
async def test_extra_fields_and_messages_arrive_as_given(scripted: tuple[Script, Server], path: str) -> None:
    script, server = scripted
    server = Server(
        "s", server.base_url, "m", "sglang", capabilities=Capabilities(chat_template_kwargs=True, abort=True)
    )
    messages = [{"role": "assistant", "content": "", "reasoning_content": "R"}, {"role": "user", "content": "q"}]
    async with ChatClient(server, 4, path) as client:  # type: ignore[arg-type]
        await client.send(ChatRequest("rid", messages, thinking=True), 5)
    assert script.seen[0]["messages"] == messages
    assert script.seen[0]["chat_template_kwargs"]["enable_thinking"] is True
    assert script.seen[0]["rid"] == "rid"
