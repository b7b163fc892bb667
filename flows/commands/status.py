"""`regen status`."""

from pathlib import Path
from typing import Any

import click


@click.command(name="status")
@click.argument("run", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), metavar="[RUN]")
def command(run: Path) -> dict[str, Any]:
    """Where a run stands: done, failed, pending, speed, remaining time, servers, and the error it ended with.

    RUN is a run folder, a data set or a work folder (default: out); of several runs the one worked on last that had
    something to do is shown. Only files are read, so it works while the run goes on, and after it crashed.

    Example: regen status out/demo
    """
    from tasks.report.find import find_run
    from tasks.report.status import read_status

    found = find_run(run)
    status = read_status(found.paths)
    for name, value in status.rows():
        click.echo(f"{name:>10}  {value}")
    if found.note:
        click.echo(f"{'note':>10}  {found.note}")
    return {**status.as_dict(), "idle_runs": list(found.idle)}
