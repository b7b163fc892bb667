"""Job files as deployment parameters: a build step for prefect.yaml, so that each value is written once."""

from pathlib import Path
from typing import Any

from flows.spec import load_job


def job(path: str) -> dict[str, Any]:
    """Read a job file; `prefect.yaml` uses the groups as `{{ job.source }}`, `{{ job.target }}` and so on.

    Raises SpecError naming the file and the field, so that `prefect deploy` stops before anything is registered.
    """
    return load_job(Path(path)).groups()
