"""One server's chat client: one request in, one typed outcome out; nothing raises, nothing is retried here."""

import asyncio
import time
from types import TracebackType
from typing import Literal

import aiohttp
import orjson

from tasks.client.answers import error_text, read_answer
from tasks.client.bodies import CHAT, GENERATE, chat_body, endpoint, generate_body
from tasks.client.outcomes import RETRYABLE, ChatOutcome, ChatRequest, IdsSource, OutcomeKind, Sampling
from tasks.client.transport import ConnectionBroken, DeadlinePassed, OpenAITransport, ThinTransport, Transport
from tasks.records import Server

__all__ = ["RETRYABLE", "ChatClient", "ChatOutcome", "ChatRequest", "IdsSource", "OutcomeKind", "Sampling"]

ABORT_S = 5.0


class ChatClient:
    """Async context manager. `limit` requests may be in flight; waiting for a slot is not charged to the deadline.

    `path`: `thin` is aiohttp alone, `openai` the openai client on aiohttp, `auto` the faster one (thin: under a third
    of the CPU a request; tests/benchmarks/bench_client.py measures it).
    """

    def __init__(self, server: Server, limit: int, path: Literal["auto", "openai", "thin"] = "auto") -> None:
        self.server = server
        self.path = "openai" if path == "openai" else "thin"
        self.limit = max(1, limit)
        self.in_flight = 0
        self._slots = asyncio.Semaphore(self.limit)
        self._thin: ThinTransport | None = None
        self._chat: Transport | None = None

    async def __aenter__(self) -> "ChatClient":
        self._thin = ThinTransport(self.server.base_url, self.server.api_key)
        self._chat = self._thin
        if self.path == "openai":
            self._chat = OpenAITransport(self.server.base_url, self.server.api_key, max(self.limit, 4096))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for transport in {self._thin, self._chat} - {None}:
            assert transport is not None
            await transport.close()

    def grow(self, limit: int) -> None:
        """Allow more requests in flight. Never shrinks: whoever sends fewer needs no permission."""
        for _ in range(limit - self.limit):
            self._slots.release()
        self.limit = max(self.limit, limit)

    async def send(self, request: ChatRequest, deadline_s: float) -> ChatOutcome:
        """Send one request and wait for its end, at most `deadline_s` seconds once it has a slot.

        When this coroutine is cancelled the server is not told: call `abort` with the request id.
        """
        assert self._thin is not None and self._chat is not None, "use ChatClient as an async context manager"
        path = endpoint(self.server, request)
        body = generate_body(request) if path == GENERATE else chat_body(self.server, request)
        async with self._slots:
            self.in_flight += 1
            begun = time.monotonic()
            try:
                transport: Transport = self._chat if path == CHAT else self._thin
                reply = await transport.post(path, body, deadline_s)
            except DeadlinePassed as error:
                return _failed(OutcomeKind.TIMEOUT, error, begun)
            except ConnectionBroken as error:
                return _failed(OutcomeKind.CONNECTION, error, begun)
            except (TypeError, ValueError) as error:  # a lone surrogate in the text, an object in the tools
                return _failed(OutcomeKind.BAD_REQUEST, error, begun)
            finally:
                self.in_flight -= 1
        return read_answer(
            reply.status,
            reply.payload,
            time.monotonic() - begun,
            generate=path == GENERATE,
            retry_after=reply.retry_after,
        )

    async def abort(self, request_id: str) -> None:
        """Tell the server to drop a request. It answers 200 for unknown ids too; failures are ignored."""
        if not self.server.capabilities.abort or self._thin is None:
            return
        try:
            await self._thin.post("/abort_request", {"rid": request_id}, ABORT_S)
        except (ConnectionBroken, DeadlinePassed):
            return

    async def stream(self, request: ChatRequest, deadline_s: float) -> ChatOutcome:
        """A streamed probe: time to the first token, text and usage. Not for data: a dying server's stream ends like a
        finished one (200, no exception), so an end without finish_reason is CONNECTION here.
        """
        assert self._thin is not None, "use ChatClient as an async context manager"
        body = chat_body(self.server, request)
        for name in ("return_token_ids", "return_meta_info", "logprobs"):
            body.pop(name, None)
        body.update(stream=True, stream_options={"include_usage": True})
        begun = time.monotonic()
        try:
            timeout = aiohttp.ClientTimeout(total=deadline_s)
            async with self._thin.session.post(CHAT, data=orjson.dumps(body), timeout=timeout) as answer:
                if answer.status != 200:
                    return read_answer(answer.status, await answer.read(), time.monotonic() - begun)
                return await _read_stream(answer, begun)
        except TimeoutError as error:
            return _failed(OutcomeKind.TIMEOUT, error, begun)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return _failed(OutcomeKind.CONNECTION, error, begun)


def _failed(kind: OutcomeKind, error: Exception, begun: float) -> ChatOutcome:
    text = str(error) or type(error).__name__
    return ChatOutcome(kind, message=text, latency_s=time.monotonic() - begun)


async def _read_stream(answer: aiohttp.ClientResponse, begun: float) -> ChatOutcome:
    parts: dict[str, list[str]] = {"content": [], "reasoning": []}
    usage: dict[str, int] = {}
    finish, first = None, None
    async for line in answer.content:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = orjson.loads(line[5:])
        if "error" in event:
            text = error_text(line[5:])
            return ChatOutcome(OutcomeKind.SERVER_ERROR, message=text, latency_s=time.monotonic() - begun)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            if first is None and (delta.get("content") or reasoning):
                first = time.monotonic() - begun
            parts["content"].append(delta.get("content") or "")
            parts["reasoning"].append(reasoning or "")
            finish = choice.get("finish_reason") or finish
    kinds = {"stop": OutcomeKind.OK, "tool_calls": OutcomeKind.OK, "length": OutcomeKind.CUT}
    kinds["abort"] = OutcomeKind.ABORTED
    return ChatOutcome(
        kinds.get(finish or "", OutcomeKind.CONNECTION),
        content="".join(parts["content"]),
        reasoning_content="".join(parts["reasoning"]) or None,
        finish_reason=finish,
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        latency_s=time.monotonic() - begun,
        ttft_s=first,
        message="" if finish else "the stream ended without a finish_reason",
        status=200,
    )
