"""`regen demo`."""

from pathlib import Path
from typing import Any

import click


@click.command(name="demo")
@click.option(
    "--prompts", metavar="FILE", help="JSONL, JSON or Parquet file, folder or s3:// URL; default: a set of 106."
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Read at most N rows.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/demo"),
    show_default=True,
    help="Folder of everything: databases, store, runs, published set.",
)
@click.option("--keep-ui", is_flag=True, help="Leave the Prefect server running afterwards.")
@click.option("--ui-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of the UI; default: a free one.")
def command(prompts: str | None, limit: int | None, out: Path, keep_ui: bool, ui_port: int | None) -> dict[str, Any]:
    """Regenerate a small data set on this machine, end to end, with a real CPU model.

    Starts a Prefect server with its UI, an S3 server and an inference server, runs the flow, publishes, reads the
    published set back, and ends the servers. Repeat the command to do only what is new; after Ctrl-C or a crash it
    goes on.

    Example: regen demo --limit 8 --out out/demo
    """
    from rich.console import Console

    from flows.demo import demo
    from flows.demo_services import DemoOptions

    options = DemoOptions(out.resolve(), prompts, limit, keep_ui, ui_port)
    return demo(options, Console(), Console(stderr=True))
