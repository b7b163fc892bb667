"""A proxy between an S3 client and its server that does what networks and busy stores do."""

import asyncio
import io
import random
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL

HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-encoding-ignored"}
CHECKSUM_HEADERS = ("x-amz-trailer", "x-amz-checksum-", "x-amz-sdk-checksum-algorithm")

ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{code} by proxy</Message></Error>'


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    query: dict
    headers: dict
    body: bytes
    fault: str = ""


@dataclass
class Proxy:
    """`decide(seen)` names a fault, or returns "" to pass the request on unharmed."""

    upstream: str
    decide: Callable[[Seen], str] = lambda seen: ""
    seen: list = field(default_factory=list)
    keep_bodies: bool = False
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def data_bytes(self) -> int:
        """Payload of every PUT that arrived."""
        return sum(int(s.headers.get("Content-Length", 0)) for s in self.seen if s.method == "PUT")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen = Seen(request.method, request.raw_path, dict(request.query), dict(request.headers), body)
        seen.fault = fault = self.decide(seen) or ""
        if not self.keep_bodies:
            seen.body = b""
        self.seen.append(seen)
        if fault.startswith("answer:"):
            _, status, code = fault.split(":")
            text = "" if request.method == "HEAD" else ERROR.format(code=code)
            return web.Response(status=int(status), text=text, content_type="application/xml")
        if fault == "cut":
            return cut(request)
        if fault == "slow":
            await asyncio.sleep(0.2)
        if fault == "damage-request":
            body = flip(body)
        try:
            return await self.forward(request, body, fault)
        except aiohttp.ClientConnectionResetError:  # the client was killed
            return cut(request)

    async def forward(self, request: web.Request, body: bytes, fault: str) -> web.StreamResponse:
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in HOP]
        url = URL(self.upstream + request.raw_path, encoded=True)
        async with self.session.request(
            request.method, url, headers=headers, data=io.BytesIO(body), allow_redirects=False
        ) as answer:
            data = await answer.read()
            kept = [(k, v) for k, v in answer.headers.items() if k.lower() not in HOP | {"content-length"}]
            if fault == "lost-answer":
                return cut(request)
            if fault == "damage-response" and request.method == "GET":
                data = flip(data)
            response = web.StreamResponse(status=answer.status, headers=kept)
            length = (
                answer.headers.get("Content-Length", str(len(data))) if request.method == "HEAD" else str(len(data))
            )
            response.headers["Content-Length"] = length
            await response.prepare(request)
            if fault == "cut-response" and len(data) > 1:
                await response.write(data[: len(data) // 2])
                return cut(request)
            await response.write(data)
            return response

    async def start(self) -> None:
        self.session = aiohttp.ClientSession(
            auto_decompress=False, skip_auto_headers=["User-Agent", "Content-Type", "Accept"]
        )
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        await self.session.close()
        await self.runner.cleanup()


def cut(request: web.Request) -> web.StreamResponse:
    """Close the connection without another byte."""
    if request.transport:
        request.transport.abort()
    return web.Response()


def flip(data: bytes) -> bytes:
    """One byte anywhere, changed at random: a fixed change would undo itself when both ways are damaged."""
    if not data:
        return data
    where = random.randrange(len(data))
    return data[:where] + bytes([data[where] ^ random.randrange(1, 256)]) + data[where + 1 :]


def strict(seen: Seen) -> str:
    """A store of the time before checksums: it refuses every header of theirs."""
    names = [name.lower() for name in seen.headers]
    if any(name.startswith(CHECKSUM_HEADERS) for name in names) or "aws-chunked" in seen.headers.get(
        "Content-Encoding", ""
    ):
        return "answer:501:NotImplemented"
    return ""


FAULTS = (
    "answer:500:InternalError",
    "answer:503:SlowDown",
    "cut",
    "lost-answer",
    "cut-response",
    "damage-request",
    "damage-response",
    "slow",
)


class Chaos:
    """Every fault at random with probability `rate`, from a seed; `base` is asked first."""

    def __init__(
        self, seed: int, rate: float = 0.15, base: Callable[[Seen], str] = lambda seen: "", faults=FAULTS
    ) -> None:
        self.random, self.rate, self.base, self.faults = random.Random(seed), rate, base, faults
        self.counts: dict[str, int] = {}
        self.lock = threading.Lock()

    def __call__(self, seen: Seen) -> str:
        refusal = self.base(seen)
        if refusal:
            return refusal
        with self.lock:
            fault = self.random.choice(self.faults) if self.random.random() < self.rate else ""
            if fault:
                self.counts[fault] = self.counts.get(fault, 0) + 1
        return fault


@contextmanager
def proxy(upstream: str, decide=lambda seen: "", keep_bodies: bool = False):
    """A running proxy, in a thread of its own."""
    one = Proxy(upstream, decide, keep_bodies=keep_bodies)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(one.start(), loop).result(30)
    try:
        yield one
    finally:
        asyncio.run_coroutine_threadsafe(one.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
