"""The servers around a demo, the checks before it, and the environment that its flow needs."""

import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.local_prefect import LocalPrefect, local_prefect
from tasks.errors import DatasetError, StorageError
from tasks.provisioning.local_store import LocalStore, local_store

BUCKET = "regen-demo"

NEEDED_BYTES = 200 << 20
"""Free disk space asked for at the start: databases, logs, store and data of a few hundred prompts."""

QUIET_AWS = ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
"""Variables that would send the demo's requests, or sign them, elsewhere."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What a person may choose. `prompts` None: those that come with the package."""

    out: Path
    prompts: str | None = None
    limit: int | None = None
    keep_ui: bool = False
    ui_port: int | None = None


@dataclass(frozen=True, slots=True)
class Services:
    """The two servers around a run."""

    prefect: LocalPrefect
    store: LocalStore


def check_prompts(prompts: str | None) -> None:
    """Refuse a prompt file that is missing, empty or binary, before anything is started. Raises DatasetError."""
    if prompts is None or "://" in prompts or any(mark in prompts for mark in "*?["):
        return
    path = Path(prompts)
    if not path.exists():
        raise DatasetError(f"no prompt file {prompts}; give a JSONL, JSON or Parquet file, a folder, or an s3:// URL")
    if path.is_dir():
        return
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
    except OSError as error:
        raise DatasetError(f"cannot read {prompts}: {error.strerror}") from error
    if not head.strip():
        raise DatasetError(f"{prompts} is empty; a prompt file has one JSON object a line, e.g. " + '{"prompt": "Hi"}')
    if path.suffix.lower() in (".jsonl", ".json", ".ndjson", ".txt", "") and b"\0" in head:
        raise DatasetError(f"{prompts} is binary, expected text with one JSON object a line (or a .parquet file)")


def prepare_out(out: Path) -> None:
    """Make the folder and see that there is room. Raises StorageError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise StorageError(f"cannot use {out}: {error.strerror}; choose another --out") from error
    if free < NEEDED_BYTES:
        raise StorageError(
            f"disk full: {free >> 20} MiB are free in {out}, the demo wants {NEEDED_BYTES >> 20} MiB; "
            "free space or choose another --out"
        )


@contextlib.contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """One demo a folder. The lock is the kernel's: it is gone with its process. Raises StorageError."""
    with (out / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise StorageError(f"another demo (process {holder}) is using {out}; wait for it, or use --out") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@contextlib.contextmanager
def open_services(options: DemoOptions) -> Iterator[Services]:
    """Both servers, started side by side. Raises ControlPlaneError or StorageError when one does not come up."""
    prefect = local_prefect(options.out / "prefect", options.keep_ui, options.ui_port)
    store = local_store(options.out / "store", BUCKET)
    with contextlib.ExitStack() as stack:
        opened = _enter_together(stack, [prefect, store])
        yield Services(opened[0], opened[1])


def _enter_together(stack: contextlib.ExitStack, managers: Sequence[AbstractContextManager[Any]]) -> list[Any]:
    """Enter all at once; whatever was entered is left again by `stack`, also when another one fails."""
    futures: list[Future[Any]] = []
    try:
        with ThreadPoolExecutor(len(managers)) as pool:
            futures = [pool.submit(manager.__enter__) for manager in managers]
    finally:
        for manager, future in zip(managers, futures, strict=False):
            if future.done() and not future.cancelled() and future.exception() is None:
                stack.push(manager)
    return [future.result() for future in futures]


@contextlib.contextmanager
def environment(values: Mapping[str, str], without: Sequence[str] = ()) -> Iterator[None]:
    """Set and unset environment variables for the `with` block."""
    names = {*values, *without}
    before = {name: os.environ.get(name) for name in names}
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def flow_environment(services: Services) -> dict[str, str]:
    """What this process needs before it imports prefect. Logs go to the UI: the terminal is the progress bar's."""
    return {
        **services.prefect.environment(),
        **services.store.environment(),
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_CLIENT_MAX_RETRIES": "9",
        "TRANSFORMERS_VERBOSITY": "error",
    }


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that the journal is closed and the servers end in order.

    A script's background job (`regen demo &`) inherits an ignored SIGINT, which would swallow SIGTERM too: it is heard
    inside the block.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
