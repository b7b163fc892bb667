"""Batches through worker processes, in order, with a bounded number in flight."""

import atexit
import functools
import gc
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from tasks.errors import RegenError
from tasks.settings import TargetSettings
from tasks.target.load import load_target
from tasks.tokenization.rows import Built, RowBuilder
from tasks.tokenization.settings import TokenizationSettings

MAX_WORKERS = 8
IN_FLIGHT = 2
"""Batches submitted a worker beyond the one whose result is awaited: bounds memory, keeps workers fed."""


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a worker needs besides the rows."""

    target: TargetSettings
    settings: TokenizationSettings
    preserve_thinking: bool
    now: datetime

    def build(self, batch: pa.RecordBatch) -> Built:
        """Rows of one batch, in this process."""
        return RowBuilder(load_target(self.target), self.settings, self.preserve_thinking, self.now).build(batch)


def worker_count(settings: TokenizationSettings) -> int:
    """Processes to use: what the settings say, else one a usable core, at most 8."""
    return settings.workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))


def build_all(job: Job, batches: Iterable[pa.RecordBatch], workers: int) -> Iterator[Built]:
    """Built rows of every batch, in order; in this process when `workers` is 1.

    Raises RegenError when a worker process died (usually killed for memory).
    """
    if workers <= 1:
        yield from map(job.build, batches)
        return
    pool = _pool(workers, job.target.model_dump_json())
    waiting: deque[Future[Built]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(job.build, batch))
            if len(waiting) >= workers * IN_FLIGHT:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        _pool.cache_clear()
        raise RegenError(
            f"a tokenization process died ({workers} were running); if memory is short, set tokenization.workers lower"
        ) from error
    finally:
        for future in waiting:
            future.cancel()


@functools.lru_cache(maxsize=1)
def _pool(workers: int, target: str) -> ProcessPoolExecutor:
    """Kept for the next chunk: a fresh process needs seconds to import and to load a tokenizer.

    Spawned, not forked: the caller has threads (servers, progress) that a fork would copy in the middle of something.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(target,))
    atexit.register(pool.shutdown, wait=False, cancel_futures=True)
    return pool


def _start(target: str) -> None:
    """One core a process: the tokenizer's own threads would only fight the other processes.

    Its pool of one thread is used all the same: encoding took 0.87 ms a row there and 1.38 ms in the main thread. What
    was imported and loaded is frozen: collecting garbage would walk all of it again and again.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = "1"
    text = load_target(TargetSettings.model_validate_json(target))
    text.prepare()
    gc.collect()
    gc.freeze()


def _end_with_parent() -> None:
    """A killed flow must not leave workers behind: they hold both ends of their queue and would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
