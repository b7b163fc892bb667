"""`regen run`."""

from pathlib import Path
from typing import Any

import click


@click.command(name="run")
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Read at most N rows of the sources.")
@click.option("--retry-failed", is_flag=True, help="Also ask again for prompts that used up their attempts.")
def command(job: Path, limit: int | None, retry_failed: bool) -> dict[str, Any]:
    """Run the job file JOB in this process, recorded by the Prefect server at PREFECT_API_URL.

    The same run as `prefect deployment run`, without a worker. Ctrl-C stops it within 20 s; the same command resumes.

    Example: PREFECT_API_URL=http://127.0.0.1:4200/api regen run deployments/qwen36.yaml --limit 1000
    """
    import asyncio

    from prefect.settings import get_current_settings

    from flows.regen import regen
    from flows.spec import RegenSpec, load_job
    from tasks.errors import ControlPlaneError

    spec = load_job(job)
    if not get_current_settings().api.url:
        raise ControlPlaneError(
            "no Prefect server is configured, and a run is never recorded in one that ends with it: "
            "run `prefect server start`, then set PREFECT_API_URL=http://127.0.0.1:4200/api"
        )
    groups = {name: getattr(spec, name) for name in RegenSpec.model_fields}
    groups["source"] = spec.source.model_copy(update={"limit": limit} if limit else {})
    groups["generation"] = spec.generation.model_copy(
        update={"retry_failed": retry_failed or spec.generation.retry_failed}
    )
    summary: dict[str, Any] = asyncio.run(regen(**groups))
    return summary
