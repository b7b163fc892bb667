"""One thread tells people how a run goes: progress.jsonl, the terminal, the Prefect card. Never in the token path."""

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.progress import publish
from tasks.records import Progress

log = logging.getLogger(__name__)

EVERY_S = 2.0
"""Seconds between readings; a reading costs well under a millisecond."""


class Reporter:
    """Reads `read()` every few seconds. Errors are swallowed and counted: reporting never fails a run."""

    def __init__(self, path: Path, read: Callable[[], Progress], every_s: float = EVERY_S) -> None:
        self._path, self._read, self._every_s = path, read, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="reporter", daemon=True)
        self.latest: Progress | None = None
        self.errors = 0

    def __enter__(self) -> "Reporter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def line(self) -> tuple[float, str]:
        """(percent, one status line) for the card in the Prefect UI."""
        return (0.0, "starting") if self.latest is None else (percent(self.latest), describe(self.latest))

    def _loop(self) -> None:
        while not self._stop.wait(self._every_s):
            self._once()
        self._once()

    def _once(self) -> None:
        try:
            self.latest = self._read()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(as_row(self.latest)) + "\n")
            publish(self.latest)
        except Exception as error:
            self.errors += 1
            log.warning("progress could not be reported: %s", error)


def seconds_before(path: Path) -> float:
    """Seconds of generation that earlier invocations of a run spent, as the last whole line of progress.jsonl says."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0.0
    for line in reversed(lines[-3:]):  # a kill may have torn the last one
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return float(json.loads(line)["elapsed_s"])
    return 0.0


def as_row(progress: Progress) -> dict[str, Any]:
    """One line of progress.jsonl, as the report reads it."""
    return {"time_s": time.time(), **dataclasses.asdict(progress)}


def percent(progress: Progress) -> float:
    """Settled prompts, in 0..100."""
    return 100.0 * (progress.done + progress.failed) / progress.total if progress.total else 100.0


def finished(progress: Progress) -> bool:
    """Whether every prompt is done or failed; nothing is left to estimate."""
    return progress.done + progress.failed >= progress.total


def describe(progress: Progress) -> str:
    """`done 120/900 · failed 3 · bad answers lately 2.4% · 1,024 tok/s · ETA 2 h (1 h 50 m to 3 h)`.

    Failed prompts ran out of attempts; bad answers are attempts, most of which a later attempt makes good.
    """
    parts = [
        f"done {progress.done:,}/{progress.total:,}",
        f"failed {progress.failed:,}",
        *([f"bad answers lately {progress.reject_rate:.1%}"] if progress.reject_rate >= 0.0005 else []),
        f"in flight {progress.in_flight:,}",
        f"{progress.output_tokens:,} tokens",
        f"{progress.tok_s:,.0f} tok/s",
    ]
    if progress.power_w is not None:
        parts.append(f"{progress.power_w:,.0f} W")
    if progress.j_per_token is not None:
        parts.append(f"{progress.j_per_token:.2f} J/token")
    if progress.accept_length is not None:
        parts.append(f"acceptance length {progress.accept_length:.2f}")
    if progress.eta_s is not None and not finished(progress):
        middle, low, high = progress.eta_s
        parts.append(f"ETA {duration(middle)} ({duration(low)} to {duration(high)})")
    down = [f"{name} {state}" for name, state in progress.servers.items() if state != "up"]
    return " · ".join(parts + down)


def duration(seconds: float) -> str:
    """`45 s`, `12 m`, `2 h 05 m`, `3 d 4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} m"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m" if hours < 48 else f"{hours // 24} d {hours % 24} h"
