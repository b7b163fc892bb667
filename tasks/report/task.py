"""The report as a Prefect task: the file, and the main figures where a person looks first."""

import asyncio
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.report import html
from tasks.report.figures import figures, markdown
from tasks.report.read import read_run
from tasks.runs import RunPaths
from tasks.ui import task as ui


# Reading and drawing take seconds; a damaged input is left out by the report itself, so a retry helps little.
@task(
    name="report", retries=1, retry_delay_seconds=5, timeout_seconds=1800, cache_policy=NO_CACHE, persist_result=False
)
async def write_report(paths: RunPaths) -> Path:
    """Write report.html and show its main figures as a Markdown artifact with a link to the file."""
    path = await asyncio.to_thread(html.write_report, paths)
    found = await asyncio.to_thread(lambda: figures(read_run(paths)))
    ui.markdown("report", f"{markdown(found)}\n\nThe whole report: `{path}`", f"run {paths.run_id}")
    return path
