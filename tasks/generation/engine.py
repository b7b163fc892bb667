"""The generation engine: one pool for the run in a thread of its own, so that nothing else can stall it."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from tasks.errors import GateError, RegenError
from tasks.generation.chunks import ChunkStore
from tasks.generation.core import Core
from tasks.generation.feeder import Feeder
from tasks.generation.line import State
from tasks.generation.plan import finished, identity_of, make_plan
from tasks.generation.prompts import PromptFile
from tasks.generation.sampling import Sampler
from tasks.generation.settings import GenerationSettings
from tasks.generation.window import Windows
from tasks.records import ChunkRecord, GateReport, LoadWindow, Progress, Server
from tasks.runs import RunPaths
from tasks.settings import SamplingSettings

log = logging.getLogger(__name__)
DEFAULT_LIMIT = 32
T = TypeVar("T")


class EngineStopped(RegenError):
    """The engine was stopped while somebody waited for a chunk; the run can be resumed."""


async def _wait_for(future: "Future[T]") -> T:
    """Wait in any loop. A waiter that leaves neither cancels the future nor leaves its error unread."""
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(waiting)


class Engine:
    """Implements LoadDriver and ServerEvents. Methods may be called from any thread or event loop.

    `limits` are requests in flight per server (or one number for all). `prompts_path` defaults to the run's own.
    """

    def __init__(
        self,
        paths: RunPaths,
        target: Any,
        sampling: SamplingSettings,
        settings: GenerationSettings,
        servers: Sequence[Server],
        *,
        limits: Mapping[str, int] | int = DEFAULT_LIMIT,
        prompts_path: Path | str | None = None,
    ) -> None:
        self._paths, self._settings, self._servers, self._limits = paths, settings, list(servers), limits
        self._target, self._sampling = target, sampling
        self._prompts = PromptFile(Path(prompts_path) if prompts_path else paths.prompts)
        self.plan = make_plan(paths, self._prompts.rows, settings.chunk_rows, self._prompts.fingerprint)
        self._store = ChunkStore(paths, self._prompts, self.plan, settings, self._identity())
        self._futures: dict[int, Future[ChunkRecord]] = {}
        self._opened: dict[int, Future[None]] = {}
        self._was_open: set[int] = set()
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._stopped = threading.Event()
        self._ready: Future[None] = Future()
        self._before = (0, 0, 0)  # done, failed, output tokens of chunks that were finished earlier
        self._began_s = time.monotonic()
        self._eta: tuple[float, float, float] | None = None
        self._power: tuple[float | None, float | None] = (None, None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._core: Core | None = None
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def _identity(self) -> dict[str, Any]:
        include = {"on_length", "retry_larger_factor", "turn_policy", "drop_repetition"}
        parts = {f"sampling.{n}": v for n, v in self._sampling.model_dump(mode="json").items()}
        parts |= {f"generation.{n}": v for n, v in self._settings.model_dump(mode="json", include=include).items()}
        parts |= {"target.template_sha256": self._target.template_sha256}
        return identity_of(self._paths, parts)

    # ---- life

    def start(self) -> None:
        """Start the thread and the first requests. Raises what the start met (a disk that refuses, a bad journal)."""
        self._thread.start()
        self._ready.result()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            log.exception("the generation engine died")
            if not self._ready.done():
                self._ready.set_exception(error)
            self._fail(error)
        finally:
            self._stopped.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        sampler = Sampler(self._sampling, self._target.generation_config)
        feeder = Feeder(self._store, sampler, self._settings, self._finished, self._fail)
        core = Core(feeder, self._target, self._sampling, self._settings, self._fail)
        feeder.add, feeder.pump, feeder.opened = core.pool.add, core.pump, self._chunk_opened
        self._windows = Windows(core)
        self._end = asyncio.Event()
        todo = await asyncio.to_thread(self._sort_out)
        for server in self._servers:
            await core.add(server, self._limit_of(server.name))
        self._core, self._began_s = core, time.monotonic()
        tasks = [asyncio.create_task(work) for work in (feeder.run(todo), feeder.keep_durable(), core.tick())]
        self._ready.set_result(None)
        await self._end.wait()
        await core.shut(self._abort_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await feeder.close(self._abort_s)

    def _sort_out(self) -> list[int]:
        """Chunks that need work. Finished ones are known by their small records: 180 of them, whatever the rows."""
        todo = []
        for index in self.chunk_indices:
            record = self._store.finished(index)
            if record is None:
                todo.append(index)
        for index, record in finished(self._paths, self.plan):
            if index not in set(todo):
                done, failed, tokens = self._before
                self._before = (done + record.done, failed + record.failed, tokens + record.output_tokens)
        return todo

    def _limit_of(self, name: str) -> int:
        return self._limits if isinstance(self._limits, int) else self._limits.get(name, DEFAULT_LIMIT)

    async def stop(self, reason: str = "", timeout_s: float = 15.0) -> None:
        """Stop dispatch, abort what is in flight (it stays pending), journal what is finished; within `timeout_s`."""
        log.info("generation stops: %s", reason or "finished")
        self._abort_s = max(0.5, timeout_s / 3)
        if self._loop is not None and not self._stopped.is_set():
            self._loop.call_soon_threadsafe(self._end.set)
            await asyncio.to_thread(self._stopped.wait, timeout_s)
        self._settle_futures(EngineStopped(f"generation was stopped ({reason or 'finished'}); resume to go on"))

    _abort_s = 5.0

    @property
    def failed(self) -> bool:
        """Whether an error stopped it; `wait_chunk` raises that error."""
        return self._failure is not None

    # ---- chunks

    @property
    def chunk_indices(self) -> list[int]:
        """Every chunk of the run, finished ones too."""
        return list(range(self.plan.chunks))

    def _future(self, index: int) -> "Future[ChunkRecord]":
        with self._lock:
            future = self._futures.setdefault(index, Future())
            if self._failure is not None and not future.done():
                future.set_exception(self._failure)
            return future

    async def wait_chunk(self, index: int) -> ChunkRecord:
        """The chunk's record once all its rows are answered or given up, on disk.

        Raises GateError when the breaker tripped or a chunk has no good row at all, ServerError when no server was
        left, StorageError when the disk refused, EngineStopped after `stop`. `retry_chunk` makes another try possible.
        """
        record = await asyncio.to_thread(self._store.finished, index)
        if record is None:
            record = await _wait_for(self._future(index))
        if record.prompts and not record.done and self._settings.breaker.mode == "enforce":
            raise self._no_good_row(record)
        return record

    def _no_good_row(self, record: ChunkRecord) -> GateError:
        text = (
            f"chunk {record.index}: none of its {record.prompts} prompts got an answer: {dict(record.failed_reasons)}"
        )
        report = self._core.breaker.report().as_dict() if self._core else {}
        return GateError(f"{text}; see {record.directory}/failed.parquet", report)

    async def wait_open(self, index: int) -> None:
        """Until the chunk's first prompts are in the pool (or it is finished, or the engine failed)."""
        if await asyncio.to_thread(self._store.finished, index) is None:
            with self._lock:
                future = self._opened.setdefault(index, Future())
                if self._failure is not None and not future.done():
                    future.set_result(None)
            await _wait_for(future)

    def _chunk_opened(self, index: int) -> None:
        with self._lock:
            self._was_open.add(index)
            future = self._opened.setdefault(index, Future())
        if not future.done():
            future.set_result(None)

    def _finished(self, record: ChunkRecord) -> None:
        future = self._future(record.index)
        if not future.done():
            future.set_result(record)

    def retry_chunk(self, index: int) -> None:
        """After an error: ask again only for what is missing. A tripped breaker starts with an empty window."""
        with self._lock:
            self._failure = None
            self._futures = {i: f for i, f in self._futures.items() if f.done() and f.exception() is None}
            self._opened = {i: f for i, f in self._opened.items() if f.done() and f.exception() is None}
            self._opened = {i: f for i, f in self._opened.items() if i in self._was_open}
        if self._core is not None:
            self._post(self._core.breaker.reset)
            self._post(self._core.feeder.refinalize, index)
            self.resume()

    def release_chunk(self, index: int) -> None:
        """What follows generation is done with this chunk: the window may move on."""
        if self._core is not None:
            self._post(self._core.feeder.release, index)

    def _fail(self, error: Exception) -> None:
        log.error("generation: %s", error)
        if self._core is not None:
            self._core.paused = True
        self._settle_futures(error)

    def _settle_futures(self, error: Exception) -> None:
        with self._lock:
            self._failure = self._failure or error
            waiting: list[Future[Any]] = [*self._futures.values(), *self._opened.values()]
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
            for opened in self._opened.values():  # whoever waits for a chunk to open learns the rest from wait_chunk
                if not opened.done():
                    opened.set_result(None)

    # ---- calls into the loop

    def _post(self, call: Callable[..., Any], *arguments: Any) -> None:
        if self._loop is not None and not self._stopped.is_set():
            with contextlib.suppress(RuntimeError):  # the loop closed between the look and the call
                self._loop.call_soon_threadsafe(call, *arguments)

    async def _ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None, "the engine is not started"
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def pause(self) -> None:
        """Send nothing new; what is in flight goes on."""
        if self._core is not None:
            self._core.paused = True

    def resume(self) -> None:
        """Send again."""
        if self._core is not None:
            self._core.paused = False
            self._post(self._core.pump)

    # ---- ServerEvents

    def server_down(self, name: str, reason: str) -> None:
        """Stop sending to `name`; what it held goes to others."""
        core = self._core
        if core is not None and name in core.lines:
            self._post(lambda: core.health.eject(core.lines[name], reason))

    def server_up(self, name: str) -> None:
        """`name` answers again: send, ramping up."""
        core = self._core
        if core is not None and name in core.lines:
            self._post(lambda: core.health.rejoin(core.lines[name]))

    def add_server(self, server: Server, limit: int | None = None) -> None:
        """A server that joins the run."""
        core = self._core
        if core is not None and self._loop is not None:
            work = core.add(server, limit or self._limit_of(server.name))
            asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def remove_server(self, name: str) -> None:
        """A server that leaves the run; what it held goes to others."""
        if self._core is not None and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._core.remove(name), self._loop).result(10)

    # ---- LoadDriver

    def servers(self) -> list[str]:
        """Names of the live servers."""
        lines = self._core.lines if self._core else {}
        return [name for name, line in list(lines.items()) if line.state in (State.UP, State.SUSPECT)]

    def set_limit(self, server: str, limit: int) -> None:
        """Requests in flight wanted at `server` from now on."""
        assert self._core is not None, "the engine is not started"
        self._post(self._core.set_limit, server, max(1, limit))

    async def window(self, server: str, min_s: float, max_s: float) -> LoadWindow:
        """Wait for a steady state at the present limit, then measure one window."""
        window: LoadWindow = await self._ask(self._windows.measure(server, min_s, max_s))
        return window

    # ---- what is shown

    def lengths(self) -> tuple[list[float], list[float]]:
        """(lengths of finished answers, a sample; lower bounds of those in flight, from their ages), tokens."""
        core = self._core
        if core is None:
            return [], []
        now, rate = time.monotonic(), core.lengths.request_tok_s
        flights = [flight for line in list(core.lines.values()) for flight in list(line.flights.values())]
        return core.lengths.observed(), [(now - flight.begun_s) * rate for flight in flights]

    def set_eta(self, eta_s: tuple[float, float, float] | None) -> None:
        """The forecast's (median, low, high), shown in `progress`."""
        self._eta = eta_s

    def set_power(self, power_w: float | None, j_per_token: float | None) -> None:
        """Watts of the run's GPUs, shown in `progress`."""
        self._power = (power_w, j_per_token)

    def report(self) -> GateReport | None:
        """The breaker's window as it stands."""
        return self._core.breaker.report() if self._core else None

    def made(self) -> tuple[int, int]:
        """(answers, output tokens) of this engine alone: what earlier ones journaled is found only as chunks open."""
        core = self._core
        return (core.settler.done, core.settler.output_tokens) if core is not None else (0, 0)

    def progress(self) -> Progress:
        """The run so far. Cheap: counters only."""
        core, now = self._core, time.monotonic()
        done, failed, tokens = self._before
        if core is None:
            return Progress(self.plan.rows, done, failed, 0, tokens, 0.0, 0.0)
        settler = core.settler
        made, steps = settler.accepted_drafts
        return Progress(
            self.plan.rows,
            done + core.feeder.resumed[0] + settler.done,
            failed + core.feeder.resumed[1] + settler.failed,
            core.in_flight,
            tokens + settler.output_tokens,
            now - self._began_s,
            core.meter.rate(now),
            made / steps if steps else None,
            core.breaker.share,
            self._power[0],
            self._power[1],
            self._eta,
            {name: line.state.value for name, line in list(core.lines.items())},
        )
