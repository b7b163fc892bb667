"""What a server's command line needs to become a supervised process: the same for SGLang, Docker and the CPU engine.

`Launch` describes it, `start` gives it to a supervisor (see `supervisor.py`) and returns a handle. Nothing here knows
which engine is behind the command.
"""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.errors import ServerError

SECRET_PREFIXES = ("AWS_", "PREFECT_API_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Variables of the flow that no engine needs; its own key goes by argument."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """How to start one server, whichever engine it is. `secrets` are blanked in its log and in every record.

    `stop_command` ends what a signal to the process group cannot reach (a container).
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    health_path: str = "/health"
    secrets: tuple[str, ...] = field(default=(), repr=False)
    stop_command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of one server: what to run and where its traces go."""

    name: str
    engine: CommandLine
    port: int
    log_path: Path
    state_path: Path
    run_id: str = ""
    gpu_uuids: tuple[str, ...] = ()
    grace_s: float = 8.0
    lock_fds: tuple[int, ...] = ()

    def shown_command(self) -> list[str]:
        """The command with secrets blanked: what may stand in records, logs and artifacts."""
        return redact(self.engine.command, self.engine.secrets)


@dataclass(frozen=True, slots=True)
class Exit:
    """How a server ended: its exit code (negative: signal number) and who wanted it."""

    code: int
    why: str


class Running:
    """A supervised server. Threads may share it; `stop` is safe to call more than once."""

    def __init__(self, launch: Launch, supervisor: "subprocess.Popen[bytes]") -> None:
        self.launch = launch
        self.pid: int | None = None
        self._supervisor = supervisor
        self._exit: Exit | None = None
        self._started: queue.Queue[bool] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"supervisor-{launch.name}", daemon=True)
        self._reader.start()

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor."""
        return self._supervisor.pid

    def poll(self) -> Exit | None:
        """How it ended, or None while it lives."""
        return self._exit

    def wait_started(self, timeout_s: float = 30.0) -> None:
        """Until the process exists (not until it is ready)."""
        try:
            self._started.get(timeout=timeout_s)
        except queue.Empty:
            self.stop()
            raise ServerError(
                f"the supervisor of {self.launch.name} started nothing in {timeout_s:.0f} s; is the machine overloaded?"
            ) from None

    def stop(self, timeout_s: float = 90.0) -> Exit | None:
        """End the server and everything it started; returns when it is gone."""
        with contextlib.suppress(OSError, ValueError):
            assert self._supervisor.stdin is not None
            self._supervisor.stdin.write(b"stop\n")
            self._supervisor.stdin.flush()
        self._reader.join(timeout=timeout_s)
        return self._exit

    def _read(self) -> None:
        assert self._supervisor.stdout is not None
        for line in self._supervisor.stdout:
            with contextlib.suppress(ValueError):
                self._take(json.loads(line))
        self._supervisor.wait()
        for pipe in (self._supervisor.stdout, self._supervisor.stdin):
            with contextlib.suppress(OSError, ValueError):
                assert pipe is not None
                pipe.close()
        if self._exit is None:
            self._exit = Exit(-9, "its supervisor died")
        self._started.put(True)

    def _take(self, message: dict[str, Any]) -> None:
        if message["event"] == "started":
            self.pid = message["pid"]
            self._started.put(True)
        elif message["event"] == "ended":
            self._exit = Exit(message["code"], message["why"])


def start(launch: Launch) -> Running:
    """Start a supervisor and, through it, the server."""
    with launch.log_path.parent.joinpath(f"{launch.name}.supervisor.log").open("ab") as complaints:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "tasks.provisioning.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,
            pass_fds=launch.lock_fds,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_path())},
        )
    assert supervisor.stdin is not None
    supervisor.stdin.write(json.dumps(_message(launch)).encode() + b"\n")
    supervisor.stdin.flush()
    running = Running(launch, supervisor)
    running.wait_started()
    return running


def _import_path() -> list[str]:
    root = str(Path(__file__).resolve().parents[2])
    return [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _message(launch: Launch) -> dict[str, Any]:
    engine = launch.engine
    return {
        "command": list(engine.command),
        "env": server_environment(engine.env, engine.command[0]),
        "log_path": str(launch.log_path),
        "state_path": str(launch.state_path),
        "secrets": list(engine.secrets),
        "stop_command": list(engine.stop_command),
        "grace_s": launch.grace_s,
        "state": {
            "name": launch.name,
            "run_id": launch.run_id,
            "port": launch.port,
            "gpus": list(launch.gpu_uuids),
            "flow_pid": os.getpid(),
            "command": launch.shown_command(),
        },
    }


def server_environment(extra: Mapping[str, str], executable: str) -> dict[str, str]:
    """The flow's environment without its secrets and its virtual environment; `extra` wins.

    The folder of the executable comes first in PATH: SGLang calls `ninja` and `nvcc` of its own environment.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SECRET_PREFIXES)}
    for name in ("VIRTUAL_ENV", "PYTHONHOME"):
        kept.pop(name, None)
    folder = str(Path(executable).parent)
    if folder != ".":
        kept["PATH"] = os.pathsep.join([folder, kept.get("PATH", os.defpath)])
    return {**kept, **extra}


def redact(words: Sequence[str], secrets: Sequence[str]) -> list[str]:
    """`words` with every secret replaced by ***."""
    shown = list(words)
    for secret in filter(None, secrets):
        shown = [word.replace(secret, "***") for word in shown]
    return shown


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def node_dir() -> Path:
    """Where this node keeps state files and GPU locks of all runs of this user; `REGEN_STATE_DIR` overrides it."""
    folder = Path(os.environ.get("REGEN_STATE_DIR") or Path(tempfile.gettempdir()) / f"drafter-regen-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ServerError(f"{folder} belongs to another user; set REGEN_STATE_DIR to a folder of your own")
    return folder
