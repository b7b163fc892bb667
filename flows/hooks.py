"""What Prefect calls around a run: its name, and what is done when it was cancelled or killed."""

import logging
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

log = logging.getLogger(__name__)

SHOWN = 40
"""Characters of the sources in a run's name."""


def run_name() -> str:
    """`qwen36-27b-thinking · Qwen3.6-27B · s3://bucket/prompts`: what a person recognises in the list of runs."""
    parameters = flow_run.parameters
    dataset = _field(parameters.get("publish"), "dataset") or "?"
    model = str(_field(parameters.get("target"), "model") or "?").rstrip("/").rsplit("/", 1)[-1]
    paths = [str(path) for path in _field(parameters.get("source"), "paths") or ()]
    sources = ", ".join(paths)
    return f"{dataset} · {model} · {sources if len(sources) <= SHOWN else '…' + sources[-SHOWN:]}"


def _field(group: Any, name: str) -> Any:
    return group.get(name) if isinstance(group, dict) else getattr(group, name, None)


def end_leftovers(flow: Any, flow_run: Any, state: Any) -> None:
    """End servers of runs whose flow process is gone; the worker calls this after a cancel or a SIGKILL.

    Supervisors end their servers when the flow's pipe closes; this is the second line. The signature is exactly what
    the worker passes by keyword, in another process than the flow's.
    """
    from tasks.provisioning.reaper import find_leftovers

    dataset = _field(flow_run.parameters.get("publish"), "dataset")
    for leftover in find_leftovers():
        log.warning("run of %s ended as %s: ended its leftover %s", dataset, state.name, leftover)
    work_dir = _field(flow_run.parameters.get("publish"), "work_dir")
    log.info("the next run of %s in %s resumes where this one stopped", dataset, Path(str(work_dir)).resolve())
