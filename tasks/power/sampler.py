"""A thread that reads every GPU a few times a second, keeps the last minutes at hand and the whole run on disk.

A Parquet file is unreadable until its footer is written, so a crash would lose everything: readings go to small part
files beside the target (each written whole, under a temporary name), which are merged when the sampler closes, or by
the next one. `read_power` reads both, during the run and after a crash.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import SensorError
from tasks.power.readings import GpuInfo, Sensor
from tasks.records import PowerSample

log = logging.getLogger(__name__)

COLUMNS = tuple(field.name for field in fields(PowerSample))
_TYPES = {
    "time_s": pa.float64(),
    "gpu_uuid": pa.string(),
    "energy_j": pa.float64(),
    "memory_used_bytes": pa.int64(),
    "event_reasons": pa.int64(),
    "throttle_sw_power_ns": pa.float64(),
    "throttle_sw_thermal_ns": pa.float64(),
    "throttle_hw_thermal_ns": pa.float64(),
    "throttle_hw_brake_ns": pa.float64(),
}
SCHEMA = pa.schema([(name, _TYPES.get(name, pa.float32())) for name in COLUMNS])
"""power.parquet: the fields of PowerSample; all but counters and times are float32."""

PART_S = 60.0
"""Seconds of readings in a part file: what a SIGKILL can lose."""
COMPACT_PARTS = 60
"""Part files that are folded into one, so that a run of days keeps tens of files, not thousands."""
SLOW_EVERY_S = 2.0
"""How often limits and memory are read again; they change by hand, not by load."""
KEEP_S = 900.0
"""Seconds of readings kept in memory for windows."""


class PowerSampler:
    """Samples `sensor` at `hz` into `path` (power.parquet). Without a sensor it does nothing and knows nothing.

    Use as a context manager. Every method may be called from any thread. A failing sensor never raises here: it is
    counted in `errors`, the last one is in `last_error`, and sampling goes on.
    """

    def __init__(
        self,
        path: Path | None,
        nvml: Sensor | None,
        hz: float = 5.0,
        *,
        part_s: float = PART_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.sensor, self.hz = path, nvml, hz
        self._part_s, self._clock = part_s, clock
        self._recent: deque[PowerSample] = deque()
        self._pending: list[PowerSample] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._info: list[GpuInfo] = []
        self._energy_j: dict[str, float] = {}
        self._last: dict[str, PowerSample] = {}
        self.errors = 0
        self.last_error: str | None = None
        self.cpu_s = 0.0
        self.elapsed_s = 0.0

    def __enter__(self) -> "PowerSampler":
        if self.sensor is None:
            return self
        self._info = self.sensor.gpus()
        self._thread = threading.Thread(target=self._loop, name="power-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(timeout=10)
            self._flush()
            if self.path is not None:
                merge_parts(self.path)

    @property
    def gpus(self) -> list[GpuInfo]:
        """The GPUs as they were when sampling began."""
        return list(self._info)

    @property
    def cpu_share(self) -> float:
        """CPU seconds of the sampling thread ÷ seconds it ran: its cost in cores."""
        return self.cpu_s / self.elapsed_s if self.elapsed_s else 0.0

    def window(self, seconds: float) -> list[PowerSample]:
        """Readings of the last `seconds`, oldest first, all GPUs mixed."""
        return self.since(time.time() - seconds)

    def since(self, start_s: float, end_s: float | None = None) -> list[PowerSample]:
        """Readings with start_s <= time_s (<= end_s), as far back as memory goes (15 minutes)."""
        with self._lock:
            return [s for s in self._recent if s.time_s >= start_s and (end_s is None or s.time_s <= end_s)]

    def mean_power_w(self, since_s: float) -> float | None:
        """Watts of all GPUs together, mean since `since_s` (Unix time); None while nothing was read."""
        by_gpu: dict[str, list[float]] = {}
        for sample in self.since(since_s):
            power_w = _watts(sample)
            if power_w is not None:
                by_gpu.setdefault(sample.gpu_uuid, []).append(power_w)
        return sum(sum(values) / len(values) for values in by_gpu.values()) if by_gpu else None

    @property
    def energy_j(self) -> float | None:
        """Joules of all GPUs since sampling began: power integrated over time; None while nothing was read.

        The driver's own energy counter is wrong on some boards (3 to 26 % of board power was seen), so it is only kept
        beside the power for a check.
        """
        with self._lock:
            return sum(self._energy_j.values()) if self._energy_j else None

    @property
    def energy_kwh(self) -> float | None:
        """`energy_j` in kilowatt hours."""
        joules = self.energy_j
        return None if joules is None else joules / 3.6e6

    def _count_energy(self, sample: PowerSample) -> None:
        before = self._last.get(sample.gpu_uuid)
        self._last[sample.gpu_uuid] = sample
        watts = _watts(sample)
        earlier_w = _watts(before) if before else None
        if before is None or watts is None or earlier_w is None:
            return
        # A gap of minutes (a suspended host, a lost driver) is not filled with a guess.
        seconds = min(max(0.0, sample.time_s - before.time_s), 60.0)
        joules = (watts + earlier_w) / 2 * seconds
        self._energy_j[sample.gpu_uuid] = self._energy_j.get(sample.gpu_uuid, 0.0) + joules

    def _loop(self) -> None:
        began, cpu_began = self._clock(), time.thread_time()
        next_s, flushed_s, slow_s = began, began, -SLOW_EVERY_S
        while not self._stop.is_set():
            now_s = self._clock()
            slow = now_s - slow_s >= SLOW_EVERY_S
            slow_s = now_s if slow else slow_s
            self._read_all(slow)
            if now_s - flushed_s >= self._part_s:
                self._flush()
                flushed_s = now_s
            self.cpu_s, self.elapsed_s = time.thread_time() - cpu_began, self._clock() - began
            next_s = max(next_s + 1 / self.hz, self._clock() - 1)
            self._stop.wait(max(0.0, next_s - self._clock()))

    def _read_all(self, slow: bool) -> None:
        assert self.sensor is not None
        taken = []
        for gpu in self._info:
            try:
                taken.append(self.sensor.read(gpu.uuid, slow=slow))
            except SensorError as error:
                self._note(str(error))
        if not taken:
            return
        oldest_s = taken[-1].time_s - KEEP_S
        with self._lock:
            self._recent.extend(taken)
            self._pending.extend(taken)
            for sample in taken:
                self._count_energy(sample)
            while self._recent and self._recent[0].time_s < oldest_s:
                self._recent.popleft()

    def _note(self, message: str) -> None:
        self.errors += 1
        if message != self.last_error:
            log.warning("power sensor: %s", message)
        self.last_error = message

    def _flush(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        if self.path is None or not pending:
            return
        try:
            write_part(self.path, pending)
        except OSError as error:
            # Watching must not end a run; the readings stay in memory for the windows.
            self._note(f"cannot keep power readings beside {self.path}: {error}")


def _watts(sample: PowerSample) -> float | None:
    return sample.power_average_w if sample.power_average_w is not None else sample.power_instant_w


def parts_dir(path: Path) -> Path:
    """Where the part files of `path` lie."""
    return path.with_name(path.name + ".parts")


def write_part(path: Path, samples: Sequence[PowerSample]) -> Path:
    """Write `samples` as the next part file of `path`."""
    folder = parts_dir(path)
    folder.mkdir(parents=True, exist_ok=True)
    parts = sorted(folder.glob("*.parquet"))
    number = int(parts[-1].stem) + 1 if parts else 0
    target = folder / f"{number:08d}.parquet"
    if len(parts) >= COMPACT_PARTS:
        _compact(parts)
    columns = {name: [getattr(sample, name) for sample in samples] for name in COLUMNS}
    _write(target, [pa.table(columns, schema=SCHEMA)])
    return target


def _compact(parts: Sequence[Path]) -> None:
    """Fold the small parts of one hour into the first of them."""
    small = [part for part in parts if part.stat().st_size < 4_000_000]
    if len(small) < COMPACT_PARTS:
        return
    _write(small[0], list(_tables(small)))
    for part in small[1:]:
        part.unlink()


def merge_parts(path: Path) -> None:
    """Append every part to `path` and drop the parts; a crash leaves the old file or the new one."""
    folder = parts_dir(path)
    parts = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
    if not parts:
        return
    _write(path, _tables([*([path] if path.exists() else []), *parts]))
    for part in parts:
        part.unlink()
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()


def read_power(path: Path) -> pa.Table:
    """All readings of a run, finished or not, in the order they were taken. Empty where there are none."""
    folder = parts_dir(path)
    files = [*([path] if path.exists() else []), *(sorted(folder.glob("*.parquet")) if folder.is_dir() else [])]
    tables = list(_tables(files))
    return pa.concat_tables(tables) if tables else SCHEMA.empty_table()


def samples_from(table: pa.Table) -> list[PowerSample]:
    """Rows of power.parquet as records."""
    return [PowerSample(**{name: row.get(name) for name in COLUMNS}) for row in table.to_pylist()]


def _tables(files: Sequence[Path]) -> Iterator[pa.Table]:
    """Row groups in order, each once: a crash between writing a merged file and dropping its parts leaves copies."""
    seen: set[tuple[float, str, int]] = set()
    for file in files:
        with pq.ParquetFile(file) as reader:
            for group in range(reader.num_row_groups):
                table = reader.read_row_group(group).cast(SCHEMA)
                if table.num_rows:
                    key = (table["time_s"][0].as_py(), table["gpu_uuid"][0].as_py(), table.num_rows)
                    if key not in seen:
                        seen.add(key)
                        yield table


def _write(path: Path, tables: Iterator[pa.Table] | Sequence[pa.Table]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
            for table in tables:
                writer.write_table(table)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
