"""Small runs on simulated servers: prompts, folders, an engine that is driven to its end."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import polars as pl

from simulator import SimFleet, SimTarget
from tasks.generation.engine import Engine
from tasks.generation.prompts import write_prompts
from tasks.generation.settings import GenerationSettings
from tasks.records import ChunkRecord, Message, Prompt
from tasks.runs import RunPaths
from tasks.settings import SamplingSettings

FAST: dict[str, Any] = {"ramp_s": 0.0, "retry_base_s": 0.01, "sample_s": 0.2, "probe_s": 0.1, "fsync_s": 0.2}
NO_BREAKER = {"mode": "monitor", "window": 500, "min_answers": 100, "max_bad_share": 1.0}


def prompt_id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def prompts(count: int, prefix: str = "question") -> list[Prompt]:
    texts = [f"{prefix} {index}" for index in range(count)]
    return [Prompt(prompt_id(text), (Message("user", text),), source="test", row=i) for i, text in enumerate(texts)]


def new_run(root: Path, made: list[Prompt]) -> RunPaths:
    paths = RunPaths(root, "run1")
    write_prompts(paths.prompts, made)
    return paths


def settings(**changes: Any) -> GenerationSettings:
    return GenerationSettings(**{**FAST, "chunk_rows": 50, "breaker": NO_BREAKER, **changes})


def engine(
    paths: RunPaths, fleet: SimFleet, *, limits: int = 16, sampling: dict[str, Any] | None = None, **changes: Any
) -> Engine:
    return Engine(
        paths,
        SimTarget(),
        SamplingSettings(**{"max_tokens": 4096, **(sampling or {})}),
        settings(**changes),
        fleet.records(),
        limits=limits,
    )


async def finish(running: Engine, *, timeout_s: float = 60.0) -> list[ChunkRecord]:
    """Start, wait for every chunk, stop."""
    running.start()
    try:
        async with asyncio.timeout(timeout_s):
            return await drain(running)
    finally:
        await running.stop()


async def drain(running: Engine) -> list[ChunkRecord]:
    """Wait for every chunk and release it, as the flow does."""

    async def one(index: int) -> ChunkRecord:
        record = await running.wait_chunk(index)
        running.release_chunk(index)
        return record

    return list(await asyncio.gather(*(one(index) for index in running.chunk_indices)))


def completions(paths: RunPaths) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(file) for file in sorted(paths.chunks.glob("*/completions.parquet"))])


def failures(paths: RunPaths) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(file) for file in sorted(paths.chunks.glob("*/failed.parquet"))])


def check_accounts(paths: RunPaths, made: list[Prompt]) -> tuple[set[str], set[str]]:
    """Proof by id: every prompt is done or failed, none twice, none invented."""
    done, failed = list(completions(paths)["prompt_id"]), list(failures(paths)["prompt_id"])
    wanted = {prompt.prompt_id for prompt in made}
    assert len(done) == len(set(done)), "an answer is there twice"
    assert len(failed) == len(set(failed)), "a failure is there twice"
    assert not set(done) & set(failed), "done and failed at once"
    assert set(done) | set(failed) == wanted, "a prompt is missing or was invented"
    return set(done), set(failed)
