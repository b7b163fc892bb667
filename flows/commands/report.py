"""`regen report`."""

from pathlib import Path
from typing import Any

import click


@click.command(name="report")
@click.argument("run", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), metavar="[RUN]")
def command(run: Path) -> dict[str, Any]:
    """Write a run's HTML report again: one self-contained file, also for a run that is unfinished or crashed.

    RUN is a run folder, a data set or a work folder (default: out); of several runs the one worked on last that had
    something to do is taken.

    Example: regen report out/demo
    """
    from tasks.report.figures import figures, tiles
    from tasks.report.find import find_run
    from tasks.report.html import write_report
    from tasks.report.read import read_run

    chosen = find_run(run)
    written = write_report(chosen.paths)
    found = figures(read_run(chosen.paths))
    for name, value in tiles(found):
        click.echo(f"{name:>16}  {value}")
    if chosen.note:
        click.echo(f"{'note':>16}  {chosen.note}")
    return {
        "report": str(written),
        "run_id": found.run_id,
        "done": found.done,
        "failed": found.failed,
        "output_tokens": found.output_tokens,
        "tok_s": found.tok_s,
        "j_per_token": found.j_per_token,
        "kwh": found.kwh,
        "idle_runs": list(chosen.idle),
    }
