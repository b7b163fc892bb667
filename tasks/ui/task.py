"""What every stage shows in the Prefect UI. Showing never fails a run: errors are swallowed and counted."""

import base64
import contextlib
import importlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.events import emit_event

from tasks.records import GateReport, Level

log = logging.getLogger(__name__)
_failures = 0


def failures() -> int:
    """How many artifacts or events could not be delivered so far."""
    return _failures


def _quietly(call: Callable[..., Any], **arguments: Any) -> Any:
    global _failures
    try:
        return call(**arguments, _sync=True) if getattr(call, "aio", None) else call(**arguments)
    except Exception as error:
        _failures += 1
        log.warning("the Prefect UI did not take %s: %s", getattr(call, "__name__", call), error)
        return None


def table(key: str, rows: Sequence[Mapping[str, Any]], description: str = "") -> None:
    """A table artifact; `key` is [a-z0-9-]."""
    _quietly(create_table_artifact, key=key, table=[dict(row) for row in rows], description=description)


def markdown(key: str, text: str, description: str = "") -> None:
    """A Markdown artifact."""
    _quietly(create_markdown_artifact, key=key, markdown=text, description=description)


def link(key: str, url: str, text: str, description: str = "") -> None:
    """A link artifact."""
    _quietly(create_link_artifact, key=key, link=url, link_text=text, description=description)


def drawn(draw: Callable[..., bytes], *arguments: Any) -> bytes:
    """The PNG that `draw` makes; empty where it fails: a plot never fails a run.

    altair looks for pandas in sys.modules and fails on one that another thread (pyarrow, while it tokenizes) is just
    importing, so it is imported whole before.
    """
    global _failures
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("pandas")
        return draw(*arguments)
    except Exception as error:
        _failures += 1
        log.warning("no picture from %s: %s", getattr(draw, "__name__", draw), error)
        return b""


def picture(key: str, png: bytes, description: str = "", text: str = "") -> None:
    """A plot inside a Markdown artifact: it needs no file server, and the image artifact would print its data URL."""
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    markdown(key, f"{text}\n\n![{description}]({url})\n", description)


def gate(report: GateReport) -> None:
    """A gate's verdict, its evidence and what to look at next."""
    mark = {Level.OK: "✅", Level.WARNING: "⚠️", Level.CRITICAL: "❌", Level.UNKNOWN: "❔"}[report.level]
    lines = [f"# {mark} {report.verdict}", "", report.summary, "", f"Gate `{report.gate}`, mode `{report.mode}`.", ""]
    lines += ["| | checked | found |", "|---|---|---|"] if report.expectations else []
    seen = "–" if report.level is Level.UNKNOWN else "✓"  # nothing was measured: a tick would claim that it was
    lines += [f"| {seen if e.passed else '✗'} | {e.name} | {e.message} |" for e in report.expectations]
    lines += ["", "## Look at next", *(f"1. {step}" for step in report.next_steps)] if report.next_steps else []
    if report.details:
        lines += ["", "```json", json.dumps(dict(report.details), indent=1, default=str)[:6000], "```"]
    markdown(f"gate-{report.gate}".replace("_", "-"), "\n".join(lines), f"{report.verdict}: {report.summary}")
    event(f"regen.gate.{report.gate}", {"verdict": report.verdict, "level": report.level.value})


def event(name: str, payload: Mapping[str, Any], resource: str = "regen.run") -> None:
    """A Prefect event (queued; about 0.1 ms)."""
    _quietly(emit_event, event=name, resource={"prefect.resource.id": resource}, payload=dict(payload))


class LiveProgress:
    """A progress artifact updated from a thread of its own, so that a slow Prefect API never touches the token path.

    `read` returns (percent, one status line). Use as a context manager.
    """

    def __init__(self, key: str, read: Callable[[], tuple[float, str]], every_s: float = 5.0) -> None:
        self._key, self._read, self._every_s = key, read, every_s
        self._stop = threading.Event()
        self._artifact: UUID | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "LiveProgress":
        # Created in the caller's thread: the artifact belongs to the flow run found in its context.
        self._artifact = _quietly(create_progress_artifact, progress=0.0, key=self._key, description="starting")
        self._thread = threading.Thread(target=self._loop, name="live-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(timeout=10)

    def _loop(self) -> None:
        while not self._stop.wait(self._every_s):
            self._update()
        self._update()

    def _update(self) -> None:
        if self._artifact is None:
            return
        percent, text = self._read()
        _quietly(update_progress_artifact, artifact_id=self._artifact, progress=percent, description=text)
