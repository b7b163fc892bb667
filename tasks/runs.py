"""Where a run keeps its files, and which prompts are already done.

<root>/<dataset>/
  manifest.json  baselines/  current
  runs/<run id>/ spec.json prompts.parquet rejected.parquet calibration.json forecast.json power.parquet
                 record.json report.html
                 chunks/00042/{journal,completions.parquet,failed.parquet,tokens.parquet,chunk.json}
"""

import contextlib
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.errors import SpecError, StorageError


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Every path of one run; nothing here touches the disk but `create`."""

    dataset_dir: Path
    run_id: str

    @property
    def run_dir(self) -> Path:
        """`runs/<run id>`."""
        return self.dataset_dir / "runs" / self.run_id

    @property
    def spec(self) -> Path:
        """The resolved spec, its identity digest and the versions in use."""
        return self.run_dir / "spec.json"

    @property
    def record(self) -> Path:
        """What each stage found, merged as it happens (see `note`)."""
        return self.run_dir / "record.json"

    @property
    def prompts(self) -> Path:
        """Accepted prompts."""
        return self.run_dir / "prompts.parquet"

    @property
    def rejected(self) -> Path:
        """Every reject and duplicate with its reason."""
        return self.run_dir / "rejected.parquet"

    @property
    def calibration(self) -> Path:
        """Measured windows and chosen limits."""
        return self.run_dir / "calibration.json"

    @property
    def forecast(self) -> Path:
        """Forecasts as they were made."""
        return self.run_dir / "forecast.json"

    @property
    def power(self) -> Path:
        """Power samples of the whole run."""
        return self.run_dir / "power.parquet"

    @property
    def report(self) -> Path:
        """The self-contained HTML report."""
        return self.run_dir / "report.html"

    @property
    def logs(self) -> Path:
        """Server logs; never read by the flow's own pipes."""
        return self.run_dir / "logs"

    @property
    def chunks(self) -> Path:
        """All chunk folders."""
        return self.run_dir / "chunks"

    @property
    def baselines(self) -> Path:
        """Known-good speed and power; outlives runs."""
        return self.dataset_dir / "baselines"

    def chunk(self, index: int) -> Path:
        """`chunks/00042`."""
        return self.chunks / f"{index:05d}"

    def note(self, **facts: Any) -> dict[str, Any]:
        """Merge `facts` into record.json atomically and return the whole record."""
        record = read_json(self.record) if self.record.exists() else {}
        record.update(facts)
        write_json(self.record, record)
        return record


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` so that a reader, or a crash, sees the old file or the new one: temporary name, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another root"
        ) from error


def sync_directory(path: Path) -> None:
    """Make a rename in `path` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Atomic, sorted, readable JSON."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True, default=_plain).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; a damaged file is an error that names it."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {error}; restore it or start a new data set") from error
    if not isinstance(value, dict):
        raise StorageError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return str(value)


def new_run_id() -> str:
    """Sortable by time, unique, and short enough to read aloud."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def open_run(dataset_dir: Path, identity: Mapping[str, Any], digest: str) -> tuple[RunPaths, bool]:
    """Adopt the unfinished run named in `current`, or begin a new one. Returns (paths, adopted).

    Raises SpecError when the unfinished run was started with another identity: two specs never mix in one run.
    """
    current = dataset_dir / "current"
    if current.exists():
        paths = RunPaths(dataset_dir, current.read_text().strip())
        if paths.spec.exists():
            check_identity(read_json(paths.spec), identity, digest, paths.run_dir)
            return paths, True
    paths = RunPaths(dataset_dir, new_run_id())
    try:
        paths.run_dir.mkdir(parents=True)
    except OSError as error:
        raise StorageError(f"cannot create {paths.run_dir}: {error.strerror}; choose another root") from error
    return paths, False


def check_identity(recorded: Mapping[str, Any], identity: Mapping[str, Any], digest: str, where: Path | str) -> None:
    """Refuse to go on under a spec that would change the data, naming each field that differs. Raises SpecError."""
    if recorded.get("identity_digest") == digest:
        return
    old = json.loads(json.dumps(recorded.get("identity", {}), default=_plain))
    new = json.loads(json.dumps(identity, default=_plain))
    fields = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    shown = "; ".join(f"{name}: {old.get(name)!r} there, {new.get(name)!r} now" for name in fields)
    raise SpecError(
        f"{where} belongs to another spec ({shown or 'digest differs'}): data of both would mix. "
        "Use the same spec again, or give the new one another data set name or root."
    )


def begin_run(paths: RunPaths, spec: Mapping[str, Any]) -> None:
    """Write spec.json, then point `current` at this run."""
    write_json(paths.spec, spec)
    write_atomic(paths.dataset_dir / "current", f"{paths.run_id}\n".encode())


def finish_run(paths: RunPaths) -> None:
    """The run is published: the next command starts a new one."""
    with contextlib.suppress(FileNotFoundError):
        (paths.dataset_dir / "current").unlink()
    sync_directory(paths.dataset_dir)


def host_name() -> str:
    """The node's name, for run records and leases."""
    return socket.gethostname()
