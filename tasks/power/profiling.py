"""A short profile of a running SGLang server through its /start_profile.

The server writes the trace itself, on its own host: it can be read only where that folder is shared with us. Profiling
slows the server for the steps it records and stops it for a moment while it writes.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from tasks.client.transport import open_session
from tasks.errors import ServerError
from tasks.power.kernels import DEVICE_WORK, Profile, read_trace, summarize_trace
from tasks.records import Server


async def record_trace(server: Server, folder: Path, *, steps: int = 20, timeout_s: float = 120.0) -> list[Path]:
    """Profile `steps` forward passes of a busy server into `folder`; the finished trace files, one a rank.

    Raises ServerError when the server refuses, or no whole trace shows up here in time (another host, or no load).
    """
    body = {
        "output_dir": await asyncio.to_thread(_prepared, folder),
        "num_steps": steps,
        # GPU alone: kernels, copies and launches; Python stacks and shapes would make traces of gigabytes.
        "activities": ["GPU"],
        "with_stack": False,
        "record_shapes": False,
    }
    async with open_session(server.base_url, server.api_key) as session:
        await _post(session, "/start_profile", body, timeout_s)
        found = await _wait_for(folder, timeout_s)
        if not found:
            with contextlib.suppress(ServerError):
                await _post(session, "/stop_profile", {}, 30.0)
            found = await _wait_for(folder, 15.0)
    if not found:
        raise ServerError(
            f"no trace in {folder} after {timeout_s:.0f} s: the server writes it on its own host, and only while it "
            "works; run this on the server's host, with load"
        )
    return found


async def _post(session: aiohttp.ClientSession, path: str, body: Mapping[str, Any], timeout_s: float) -> None:
    try:
        async with session.post(path, json=dict(body), timeout=aiohttp.ClientTimeout(total=timeout_s)) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise ServerError(f"{path} answered {answer.status}: {text[:300]}; another profile may be under way")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ServerError(f"{path} was not answered: {error or type(error).__name__}") from error


async def _wait_for(folder: Path, timeout_s: float) -> list[Path]:
    """Trace files whose sizes stand still and that can be read to their end."""
    until_s = time.monotonic() + timeout_s
    before: dict[Path, int] = {}
    while time.monotonic() < until_s:
        sizes = await asyncio.to_thread(_sizes, folder)
        if sizes and sizes == before and await asyncio.to_thread(_all_whole, sizes):
            return list(sizes)
        before = sizes
        await asyncio.sleep(1.0)
    return []


def _prepared(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder.resolve())


def _sizes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in sorted(folder.glob("**/*.trace.json*"))}


def _all_whole(paths: Iterable[Path]) -> bool:
    return all(_whole(path) for path in paths)


def _whole(path: Path) -> bool:
    try:
        read_trace(path)
    except ServerError:
        return False
    return True


def summarize_files(paths: Sequence[Path]) -> Profile | None:
    """One summary of all ranks' traces."""
    events: list[dict[str, Any]] = []
    for rank, path in enumerate(paths):
        for event in read_trace(path):
            # Ranks number their devices alike; keep them apart.
            device = (event.get("args") or {}).get("device", 0) if event.get("cat") in DEVICE_WORK else 0
            events.append({**event, "args": {"device": f"{rank}:{device}"}})
    return summarize_trace(events)
