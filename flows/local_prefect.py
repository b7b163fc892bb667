"""A real local Prefect server on SQLite, with its UI, as a child process. The ephemeral one loses records.

Its home (database, result storage, concurrency leases) lies inside the data set's folder, so that earlier runs are
still in the UI at the next start. This module does not import prefect: threads that are not the flow's own read the
settings of the process, which are made at the first import and must then find PREFECT_API_URL.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import ControlPlaneError, StorageError
from tasks.provisioning.launcher import CommandLine, Launch, Running, start
from tasks.provisioning.local_store import HOST, await_previous, choose_ports, port_is_free
from tasks.provisioning.supervisor import start_ticks
from tasks.provisioning.wire import call
from tasks.runs import write_json

START_TIMEOUT_S = 120.0
"""A first start makes the database: 10 s on a quiet machine."""


@dataclass(frozen=True, slots=True)
class LocalPrefect:
    """A Prefect server that answers. `owned`: started here; `home` is None for a server of somebody else."""

    api_url: str
    owned: bool
    home: Path | None = None
    log_path: Path | None = None

    @property
    def ui_url(self) -> str:
        """What a person opens."""
        return self.api_url.removesuffix("/").removesuffix("/api")

    def environment(self) -> dict[str, str]:
        """Variables of a process that works against this server; to be set before it imports prefect."""
        home = {"PREFECT_HOME": str(self.home)} if self.home else {}
        return {"PREFECT_API_URL": self.api_url, **home}


@contextlib.contextmanager
def local_prefect(home: Path, keep_ui: bool = False, port: int | None = None) -> Iterator[LocalPrefect]:
    """A Prefect server for the `with` block: one that answers at PREFECT_API_URL, one kept from before, or a new one.

    A new one ends with the block, and with this process however that ends, unless `keep_ui`. Raises ControlPlaneError
    where `port` is taken or the server does not start.
    """
    named = os.environ.get("PREFECT_API_URL", "")
    if named and answers(named):
        yield LocalPrefect(named, owned=False)
        return
    try:
        home.mkdir(parents=True, exist_ok=True)
        await_previous(home / "server.json", "Prefect server")
    except OSError as error:
        raise StorageError(f"cannot create {home}: {error.strerror}; free space or choose another folder") from error
    kept = find_kept(home)
    if kept is not None:
        yield LocalPrefect(kept, owned=False, home=home, log_path=home / "server.log")
        return
    port = _choose_port(home, port)
    server = LocalPrefect(f"http://{HOST}:{port}/api", True, home, home / "server.log")
    if keep_ui:
        _start_kept(server, port)
        yield server
        return
    running = _start_supervised(server, port)
    try:
        _await_ready(server, running)
        yield server
    finally:
        _end_gently(running)


def answers(api_url: str) -> bool:
    """Whether a Prefect server is healthy there."""
    return call(f"{api_url.rstrip('/')}/health", timeout_s=5.0).ok


def find_kept(home: Path) -> str | None:
    """API address of the server that an earlier `--keep-ui` left running on this home."""
    try:
        kept = json.loads((home / "kept.json").read_text())
        alive = start_ticks(int(kept["pid"])) == kept["ticks"]
        url = str(kept["api_url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return url if alive and answers(url) else None


def kept_pid(home: Path) -> int | None:
    """Process id of that server: `kill` ends it."""
    return int(json.loads((home / "kept.json").read_text())["pid"]) if find_kept(home) else None


def end_kept(home: Path) -> bool:
    """End the server that `--keep-ui` left on this home; whether there was one."""
    import psutil

    pid = kept_pid(home)
    if pid is None:
        return False
    process = psutil.Process(pid)
    family = [*process.children(recursive=True), process]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    for member in psutil.wait_procs(family, timeout=10)[1]:
        member.kill()
    (home / "kept.json").unlink(missing_ok=True)
    return True


def _choose_port(home: Path, wanted: int | None) -> int:
    if wanted is None:
        return choose_ports(home / "ports.json", ["prefect"])["prefect"]
    if not port_is_free(wanted):
        raise ControlPlaneError(
            f"port {wanted} is taken on {HOST}: no Prefect server can listen there; choose another one, or leave it out"
        )
    return wanted


def _command(port: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port))


def _environment(home: Path, port: int) -> dict[str, str]:
    return {
        # The arguments alone leave the pages asking port 4200.
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_UI_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home}/prefect.db",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # The in-memory default forgets who holds a deployment's slot when the server restarts, and kills that run.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_CLI_PROMPT": "false",
        "DO_NOT_TRACK": "1",
    }


def _start_supervised(server: LocalPrefect, port: int) -> Running:
    assert server.home is not None and server.log_path is not None
    return start(
        Launch(
            name="prefect",
            engine=CommandLine(command=_command(port), env=_environment(server.home, port), health_path="/api/health"),
            port=port,
            log_path=server.log_path,
            state_path=server.home / "server.json",
            grace_s=6.0,
        )
    )


def _end_gently(running: Running, grace_s: float = 8.0) -> None:
    """SIGINT lets the server write what it has queued (about 1.5 s); on SIGTERM it dies at once."""
    deadline = time.monotonic() + grace_s
    with contextlib.suppress(ProcessLookupError):
        if running.pid is not None and running.poll() is None:
            os.kill(running.pid, signal.SIGINT)
    while running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    running.stop()


def _start_kept(server: LocalPrefect, port: int) -> None:
    """A server that outlives this process: its own session, and a log file instead of our pipes."""
    assert server.home is not None and server.log_path is not None
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_API_", "AWS_"))}
    with server.log_path.open("ab") as log:
        process = subprocess.Popen(
            _command(port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**clean, **_environment(server.home, port)},
        )
    record = {"pid": process.pid, "ticks": start_ticks(process.pid), "api_url": server.api_url}
    write_json(server.home / "kept.json", record)
    _await_ready(server, process)


def _last_words(server: LocalPrefect) -> str:
    """What its log says last about an error, such as a full disk."""
    assert server.log_path is not None
    with contextlib.suppress(OSError):
        lines = server.log_path.read_text(errors="replace").splitlines()[-200:]
        said = [line.strip() for line in lines if "Error" in line.split(":", 1)[0].rsplit(" ", 1)[-1]]
        return f" ({said[-1][:200]})" if said else ""
    return ""


def _await_ready(server: LocalPrefect, running: "Running | subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if running.poll() is not None:
            raise ControlPlaneError(f"the Prefect server ended at start{_last_words(server)}; read {server.log_path}")
        if answers(server.api_url):
            return
        time.sleep(0.2)
    raise ControlPlaneError(f"the Prefect server is not ready after {START_TIMEOUT_S:.0f} s; read {server.log_path}")
