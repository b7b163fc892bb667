"""One simulated server: HTTP around a Batch. Everything it says is marked as coming from a simulator."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from simulator.answers import chat_answer, error_answer, generate_answer, loads_answer, metrics_text, server_info
from simulator.batching import Batch
from simulator.codec import Codec, ToyCodec
from simulator.faults import Fault, FaultPlan
from simulator.settings import SimSettings
from simulator.writer import Script, plan_answer
from tasks.records import Capabilities, Server

VERSIONS = {"sglang": "0.5.17+simulator", "sglang-old": "0.5.11+simulator", "plain": ""}


class SchedulerDied(Exception):
    """The simulated scheduler was killed."""


class SimServer:
    """In-process server on a free port; use as an async context manager, in any event loop.

    `inject(Fault)` or POST /simulator/fault commands a fault; `record()` is the Server others are given.
    """

    def __init__(
        self,
        settings: SimSettings | None = None,
        *,
        name: str = "sim0",
        faults: FaultPlan | None = None,
        codec: Codec | None = None,
        port: int = 0,
    ) -> None:
        self.settings, self.name, self.port = settings or SimSettings(), name, port
        self.faults = faults or FaultPlan()
        self.codec = codec or ToyCodec()
        self.requests = self.finished = self.peak = 0
        self.bodies: list[dict[str, Any]] = []
        self.keep_bodies = False
        self.aborted: list[str] = []
        self.answered: dict[str, int] = {}
        self.services: list[float] = []  # real seconds each finished request needs when nothing waits
        self.last_end_s = 0.0
        self.batch: Batch
        self._state = "ok"
        self._heartbeat: float | None = None
        self._planned: list[Fault] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._began = time.monotonic()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def record(self) -> Server:
        """As provisioning would describe it."""
        old, plain = self.settings.api == "sglang-old", self.settings.api == "plain"
        can = Capabilities(
            return_token_ids=not old and not plain,
            generate_endpoint=not plain,
            chat_template_kwargs=not plain,
            separate_reasoning=not plain,
            abort=not plain,
            loads=not plain,
            metrics=not plain and self.settings.metrics,
        )
        return Server(
            self.name,
            self.url,
            self.settings.model,
            engine="openai" if plain else "sglang",
            version=VERSIONS[self.settings.api],
            capabilities=can,
            max_running_requests=self.settings.max_running,
            context_tokens=self.settings.context_tokens,
        )

    async def __aenter__(self) -> "SimServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; on the same port again after a crash."""
        self.batch = Batch(self.settings, asyncio.get_running_loop())
        app = web.Application(client_max_size=1 << 30, middlewares=[self._gate])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/simulator/fault", self._command)
        app.router.add_get("/simulator/state", self._describe)
        if self.settings.api != "plain":
            app.router.add_post("/generate", self._generate)
            app.router.add_post("/abort_request", self._abort)
            app.router.add_post("/flush_cache", self._flush)
            for path in ("/health", "/health_generate"):
                app.router.add_get(path, self._health)
            for path in ("/server_info", "/get_server_info"):
                app.router.add_get(path, self._info)
            for path in ("/model_info", "/get_model_info"):
                app.router.add_get(path, self._model_info)
            app.router.add_get("/v1/loads", self._loads)
            app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05, handler_cancellation=False)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, backlog=4096)
        await self._site.start()
        self.port = self._site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self._began = time.monotonic()
        self._state = "ok"

    async def stop(self) -> None:
        """Stop listening and drop every connection."""
        for timer in self._timers:
            timer.cancel()
        self.batch.kill(SchedulerDied())
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    # ---- faults

    def inject(self, fault: Fault) -> None:
        """Command a fault now, later, or after a number of requests (call from the server's loop)."""
        if fault.after_requests is not None and self.requests < fault.after_requests:
            self._planned.append(fault)
            return
        self._later(fault.after_s or 0.0, lambda: self._strike(fault))

    def _later(self, delay_s: float, call: Any) -> None:
        if delay_s <= 0:
            call()
        else:
            self._timers.append(asyncio.get_running_loop().call_later(delay_s, call))

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "slow":
            self.batch.change(slow_factor=fault.factor)
        else:
            self._state = fault.kind
            self._heartbeat = time.time() if fault.kind == "hang" else None
            if fault.kind == "crash":
                self.batch.kill(SchedulerDied())
            else:
                self.batch.change(frozen=True)
        if fault.lasts_s is not None:
            self._later(fault.lasts_s, self.heal)

    def heal(self) -> None:
        """End every server-level fault (a crash: the process is back, empty)."""
        self._state, self._heartbeat = "ok", None
        self.batch.change(frozen=False, slow_factor=1.0)

    def _count(self) -> None:
        self.requests += 1
        for fault in [f for f in self._planned if self.requests >= (f.after_requests or 0)]:
            self._planned.remove(fault)
            self._later(fault.after_s or 0.0, lambda fault=fault: self._strike(fault))

    # ---- HTTP

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._state == "crash" and not request.path.startswith("/simulator"):
            return self._reset(request)
        try:
            answer: web.StreamResponse = await handler(request)
        except SchedulerDied:
            return self._reset(request)
        if not answer.prepared:
            answer.headers["X-Simulator"] = "1"
        return answer

    @staticmethod
    def _reset(request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _command(self, request: web.Request) -> web.Response:
        self.inject(Fault(**await request.json()))
        return web.Response()

    async def _describe(self, request: web.Request) -> web.Response:
        return web.json_response({"simulator": True, "state": self._state, "power_w": self.power_w()})

    def power_w(self) -> float:
        """The power trace's value now: a hung or wedged server draws what an idle one does."""
        stuck = self._state != "ok" or self.batch.frozen
        return self.settings.power_w(0 if stuck else self.batch.running)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self._count()
        if self.keep_bodies:
            self.bodies.append(body)
        kwargs = body.get("chat_template_kwargs") or {}
        thinking = bool(kwargs.get("enable_thinking", True)) and self.settings.api != "plain"
        fault = self.faults.draw(json.dumps(body["messages"], sort_keys=True), body.get("seed"), str(body.get("rid")))
        prompt_ids = self.codec.prompt_ids(body["messages"], body.get("tools"), thinking)
        refused = self._refuse(fault, len(prompt_ids), int(body.get("max_tokens") or 128))
        if refused is not None:
            return refused
        script = plan_answer(self.settings, self.codec, body, prompt_ids, thinking, fault)
        if body.get("stream"):
            return await self._stream(request, body, script)
        ended = await self._spend(body, script)
        answer = chat_answer(self.settings, body, script, ended)
        return await self._deliver(request, answer, script)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self._count()
        if self.keep_bodies:
            self.bodies.append(body)
        params = body.get("sampling_params") or {}
        as_chat = {"input_ids": body["input_ids"], "seed": params.get("sampling_seed"), "rid": body.get("rid")}
        as_chat["max_tokens"] = params.get("max_new_tokens", 128)
        fault = self.faults.draw(json.dumps(body["input_ids"]), as_chat["seed"], str(body.get("rid")))
        refused = self._refuse(fault, len(body["input_ids"]), as_chat["max_tokens"], generate=True)
        if refused is not None:
            return refused
        thinking = bool(body.get("require_reasoning"))
        script = plan_answer(self.settings, self.codec, as_chat, body["input_ids"], thinking, fault)
        ended = await self._spend(as_chat, script)
        return await self._deliver(request, generate_answer(self.codec, script, ended), script)

    def _refuse(self, fault: str | None, prompt: int, limit: int, generate: bool = False) -> web.StreamResponse | None:
        if prompt + limit > self.settings.context_tokens:
            return error_answer(400, _overflow_text(prompt, limit, self.settings.context_tokens), generate)
        codes = {"error_500": 500, "error_429": 429, "error_503": 503}
        return error_answer(codes[fault], f"simulated {fault}", generate) if fault in codes else None

    async def _spend(self, body: Mapping[str, Any], script: Script) -> str:
        """Wait until the batch has made the tokens; `abort` cuts the script to what was made."""
        rid = str(body.get("rid") or uuid.uuid4().hex)
        script.meta["id"] = rid
        begun = time.monotonic()
        if script.fault == "abort":
            script.work = max(1, script.work // 2)
        work = self.batch.submit(rid, len(script.prompt_ids), script.work)
        self.peak = max(self.peak, self.batch.running + self.batch.queued)
        ended = await work.done
        script.meta["e2e_latency"] = time.monotonic() - begun
        if script.fault == "abort":
            ended = "abort"
        if ended == "abort":
            script.ids = script.ids[: max(0, len(script.ids) // 2)]
            script.usage_tokens = len(script.ids)
        else:
            self.finished += 1
            self.services.append(script.work / (self.settings.request_tok_s * self.settings.speedup))
            self.last_end_s = asyncio.get_running_loop().time()
            self.answered[rid] = self.answered.get(rid, 0) + 1
        return ended

    async def _deliver(self, request: web.Request, answer: dict[str, Any], script: Script) -> web.StreamResponse:
        payload = json.dumps(answer).encode()
        if script.fault == "reset":
            return self._reset(request)
        if script.fault == "garbage":
            return web.Response(body=b"\x00\x01" + payload[::-1], content_type="application/json")
        if script.fault == "truncated":
            cut = web.StreamResponse(headers={"Content-Length": str(len(payload)), "X-Simulator": "1"})
            with contextlib.suppress(ConnectionError):
                await cut.prepare(request)
                await cut.write(payload[: len(payload) // 2])
            return self._reset(request)
        return web.Response(body=payload, content_type="application/json")

    async def _stream(self, request: web.Request, body: Mapping[str, Any], script: Script) -> web.StreamResponse:
        """First words at once, the rest at the end: enough for a probe of the time to the first token."""
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Simulator": "1"})
        await answer.prepare(request)
        head = {"choices": [{"index": 0, "delta": {"reasoning_content": "…", "content": ""}, "finish_reason": None}]}
        await answer.write(b"data: " + json.dumps(head).encode() + b"\n\n")
        ended = await self._spend(body, script)
        whole = chat_answer(self.settings, body, script, ended)
        choice = whole["choices"][0]
        last = {
            "choices": [{"index": 0, "delta": choice["message"], "finish_reason": choice["finish_reason"]}],
            "usage": whole["usage"],
        }
        await answer.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        return answer

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        self.batch.drop(rid)
        return web.Response()

    async def _flush(self, request: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")

    async def _health(self, request: web.Request) -> web.Response:
        starting = time.monotonic() - self._began < self.settings.startup_s
        if self._state == "hang":
            await asyncio.sleep(20.0 / self.settings.speedup)
        return web.Response(status=503 if starting or self._state == "hang" else 200)

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.settings.model, "object": "model", "max_model_len": self.settings.context_tokens}
        return web.json_response({"object": "list", "data": [model]})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.settings.model, "is_generation": True, "simulator": True})

    async def _info(self, request: web.Request) -> web.Response:
        while self._state == "hang":
            await asyncio.sleep(0.05)
        return web.json_response(server_info(self.settings, VERSIONS[self.settings.api]))

    async def _loads(self, request: web.Request) -> web.Response:
        outer = datetime.now(UTC).isoformat()
        beat = self._heartbeat if self._heartbeat is not None else time.time()
        return web.json_response(loads_answer(self.settings, self.batch, outer, beat))

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.settings.metrics:
            return web.Response(status=404)
        self.batch._advance()
        return web.Response(text=metrics_text(self.settings, self.batch))


def _overflow_text(prompt: int, limit: int, context: int) -> str:
    return (
        f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total "
        f"of {prompt + limit} tokens: {prompt} tokens from the input messages and {limit} tokens for the completion."
    )
