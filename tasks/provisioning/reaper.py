"""What dead runs left on this node: server processes, containers, locks. And the lock that keeps two runs off one GPU.

A run that Prefect marked CRASHED may still be alive, so the lock is the kernel's (flock), not a database's: it lasts
exactly as long as the flow or one of its supervisors lives.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import ServerError
from tasks.provisioning.launcher import node_dir
from tasks.provisioning.supervisor import session_members, start_ticks

STATE_FOLDER = "servers"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A server of another run that is still there. `ended`: the reaper put an end to it."""

    name: str
    run_id: str
    pid: int
    port: int
    gpus: tuple[str, ...]
    age_s: float
    supervised: bool
    ended: bool
    log_path: str

    def __str__(self) -> str:
        what = "ended it" if self.ended else "its supervisor is alive" if self.supervised else "left alone"
        return (
            f"server {self.name} of run {self.run_id or '?'} "
            f"(pid {self.pid}, port {self.port}, {self.age_s / 60:.0f} min old): {what}"
        )


def state_path(run_id: str, name: str) -> Path:
    """Where the supervisor of one server keeps its state."""
    return node_dir() / STATE_FOLDER / f"{run_id or 'run'}-{name}.json"


def find_leftovers(run_id: str | None = None, end: bool = True) -> list[Leftover]:
    """Servers on this node whose supervisor died, and those of living runs (reported, never touched).

    With `run_id` only that run's. Unsupervised servers are ended when `end` is set: nobody else will do it.
    """
    found = []
    for path in sorted((node_dir() / STATE_FOLDER).glob("*.json")):
        state = _read(path)
        if state is None or (run_id is not None and state.get("run_id") != run_id):
            continue
        # The kernel gives no new process the number of a session that still has members.
        alive = bool(session_members(int(state["pid"]), int(state["start_ticks"] or 0)))
        supervised = start_ticks(state["supervisor_pid"]) == state["supervisor_ticks"]
        if not alive and not supervised and not state.get("stop_command"):
            path.unlink(missing_ok=True)
            continue
        ended = end and not supervised
        if ended:
            _end(state, alive)
            path.unlink(missing_ok=True)
        found.append(_leftover(state, supervised, ended))
    return found


def end_run(run_id: str, wait_s: float = 30.0) -> list[Leftover]:
    """End every server of one run, also those still supervised: for the hooks of a cancelled or crashed flow."""
    for path in (node_dir() / STATE_FOLDER).glob("*.json"):
        state = _read(path)
        if state and state.get("run_id") == run_id:
            if start_ticks(state["supervisor_pid"]) == state["supervisor_ticks"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(state["supervisor_pid"], signal.SIGTERM)
            deadline = time.monotonic() + wait_s
            while path.exists() and time.monotonic() < deadline:
                if start_ticks(state["supervisor_pid"]) != state["supervisor_ticks"]:
                    break
                time.sleep(0.1)
    return find_leftovers(run_id)


def _leftover(state: dict[str, Any], supervised: bool, ended: bool) -> Leftover:
    return Leftover(
        name=str(state.get("name", "?")),
        run_id=str(state.get("run_id", "")),
        pid=int(state["pid"]),
        port=int(state.get("port", 0)),
        gpus=tuple(state.get("gpus", ())),
        age_s=max(0.0, time.time() - float(state.get("started_at", time.time()))),
        supervised=supervised,
        ended=ended,
        log_path=str(state.get("log_path", "")),
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    wanted = {"pid", "start_ticks", "supervisor_pid", "supervisor_ticks"}
    return state if isinstance(state, dict) and wanted <= state.keys() else None


def _end(state: dict[str, Any], alive: bool) -> None:
    if state.get("stop_command"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(state["stop_command"], capture_output=True, timeout=60, check=False)
    if alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(state["pgid"]), signal.SIGKILL)


class GpuLocks:
    """One locked file a GPU. The descriptors are handed to the supervisors, so a GPU stays guarded until its server
    is gone even when the flow was killed."""

    def __init__(self, files: Sequence[int] = ()) -> None:
        self.fds = tuple(files)

    def release(self) -> None:
        """Let go of this process's share of the locks."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = ()


def lock_gpus(uuids: Sequence[str], run_id: str, wait_s: float = 30.0) -> GpuLocks:
    """Lock every GPU, waiting a little for servers of a run that is just ending.

    Raises ServerError naming the run that holds one.
    """
    files: list[int] = []
    deadline = time.monotonic() + wait_s
    try:
        for uuid in uuids:
            path = node_dir() / f"gpu-{uuid.replace('/', '_')}.lock"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            files.append(fd)
            _take(fd, path, deadline)
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"run_id": run_id, "pid": os.getpid(), "since": time.time()}).encode(), 0)
    except BaseException:
        GpuLocks(files).release()
        raise
    return GpuLocks(files)


def _take(fd: int, path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(fd, 4096, 0).decode("utf-8", "replace") or "an unknown run"
                raise ServerError(
                    f"GPU {path.stem.removeprefix('gpu-')} is in use by {holder}: "
                    "a run marked CRASHED may still be alive. "
                    "Wait for it, end it, or name other GPUs in serving.gpus"
                ) from None
            time.sleep(0.2)
