"""Keeps the pool fed from open chunks, finalizes complete ones, makes journals durable; blocking work in threads."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tasks.generation.chunks import Chunk, ChunkStore
from tasks.generation.jobs import Job
from tasks.generation.journal import Kind
from tasks.generation.plan import DONE, FAILED
from tasks.generation.prompts import Row
from tasks.generation.sampling import Sampler
from tasks.generation.settings import GenerationSettings
from tasks.records import ChunkRecord


class Feeder:
    """`hungry(True)` asks for more prompts; `on_finished(record)` and `fail(error)` tell the facade."""

    def __init__(
        self,
        store: ChunkStore,
        sampler: Sampler,
        settings: GenerationSettings,
        on_finished: Callable[[ChunkRecord], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._store, self._sampler, self._settings = store, sampler, settings
        self._on_finished, self._fail = on_finished, fail
        self.chunks: dict[int, Chunk] = {}
        self.unreleased: set[int] = set()
        self.resumed = (0, 0)  # rows done and failed that open journals already held
        self.add: Callable[[Job], None] = lambda job: None
        self.pump: Callable[[], None] = lambda: None
        self.opened: Callable[[int], None] = lambda index: None
        self._hungry, self._room = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def hungry(self, more: bool) -> None:
        """Whether the pool runs low."""
        if more:
            self._hungry.set()
        else:
            self._hungry.clear()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """A task of its own, kept until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self, indices: list[int]) -> None:
        """Open chunk after chunk as the pool empties; a chunk is no barrier."""
        try:
            for index in indices:
                await self._wait_for_room()
                chunk = await asyncio.to_thread(self._store.open, index)
                self.chunks[index] = chunk
                done, failed = self.resumed
                self.resumed = (done + chunk.states.count(DONE), failed + chunk.states.count(FAILED))
                self.opened(index)
                await self._feed(chunk)
        except Exception as error:
            self._fail(error)

    async def _wait_for_room(self) -> None:
        """At most `open_chunks` finished chunks may wait for what comes after generation (their files fill the disk).

        Chunks that only wait for their last answers do not count: a few very long answers must not starve the fleet.
        """
        while True:
            await self._hungry.wait()
            if len(self.unreleased) < self._settings.open_chunks:
                return
            self._room.clear()
            await self._room.wait()

    def release(self, index: int) -> None:
        """What follows generation is done with this chunk."""
        self.unreleased.discard(index)
        self._room.set()

    async def _feed(self, chunk: Chunk) -> None:
        batches = self._store.rows(chunk)
        while (batch := await asyncio.to_thread(_next, batches)) is not None:
            for row in batch:
                self.add(self._store.job(chunk, row, self._sampler))
            self.pump()
            await self._hungry.wait()
        chunk.fed = True
        chunk.logs = {}
        self._maybe_finalize(chunk)

    # ---- what the settler reports

    def append(self, job: Job, kind: Kind, record: dict[str, Any]) -> None:
        """Journal one record of a job. Raises StorageError when the disk refuses."""
        self.chunks[job.chunk].journal.append(job.row, job.turn, kind, record)

    def row_done(self, job: Job) -> None:
        """The row has its last answer."""
        self._mark(job, DONE)

    def row_failed(self, job: Job) -> None:
        """The row is given up."""
        self._mark(job, FAILED)

    def _mark(self, job: Job, state: int) -> None:
        chunk = self.chunks[job.chunk]
        chunk.states[job.row] = state
        self._maybe_finalize(chunk)

    def _maybe_finalize(self, chunk: Chunk) -> None:
        if chunk.complete and not chunk.finalizing:
            chunk.finalizing = True
            self.spawn(self._finalize(chunk))

    async def _finalize(self, chunk: Chunk) -> None:
        try:
            record = await asyncio.to_thread(self._store.finalize, chunk)
        except Exception as error:
            self._fail(error)
            return
        self.chunks.pop(chunk.index, None)
        self.unreleased.add(chunk.index)
        self._on_finished(record)

    def refinalize(self, index: int) -> None:
        """Try again to write the files of a complete chunk (after a disk was full)."""
        chunk = self.chunks.get(index)
        if chunk is not None and chunk.complete:
            self.spawn(self._finalize(chunk))

    # ---- durability

    async def keep_durable(self) -> None:
        """fsync every open journal at least each second."""
        while True:
            await asyncio.sleep(self._settings.fsync_s)
            try:
                await asyncio.to_thread(self._sync, list(self.chunks.values()))
            except OSError as error:
                self._fail(error)

    @staticmethod
    def _sync(chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if not chunk.finalizing:
                chunk.journal.sync()

    async def close(self, timeout_s: float) -> None:
        """Let running finalizations end, then make the journals durable and close them."""
        pending = {task for task in self._tasks if not task.done()}
        if pending:
            await asyncio.wait(pending, timeout=timeout_s)
        for chunk in self.chunks.values():
            await asyncio.to_thread(chunk.journal.close)


def _next(batches: Iterator[list[Row]]) -> list[Row] | None:
    return next(batches, None)
