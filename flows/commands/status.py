"""`regen status`."""

from pathlib import Path
from typing import Any

import click


@click.command(name="status")
@click.argument("run", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), metavar="[RUN]")
def command(run: Path) -> dict[str, Any]:
    """Where a run stands: done, failed, pending, speed, remaining time, servers.

    RUN is a run folder, a data set or a work folder (default: out); of several runs the one worked on last is shown.
    Only files are read, so it works while the run goes on, and after it crashed.

    Example: regen status out/demo
    """
    from tasks.report.find import find_run
    from tasks.report.status import read_status

    status = read_status(find_run(run))
    for name, value in status.rows():
        click.echo(f"{name:>10}  {value}")
    return status.as_dict()
