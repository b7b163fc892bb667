"""`regen verify`."""

from typing import Any

import click

from flows.outcome import Outcome


@click.command(name="verify")
@click.argument("where", metavar="URL|RUN_DIR")
@click.option("--endpoint-url", metavar="URL", help="S3 endpoint that is not AWS; default: AWS_ENDPOINT_URL.")
@click.option("--region", help="Default: the usual AWS chain.")
def command(where: str, endpoint_url: str | None, region: str | None) -> dict[str, Any]:
    """Re-read a published set, or a run's files, byte by byte against what was written.

    Exit status 0: identical; 3: something differs, each difference on a line of its own; 4: it cannot be read.
    Credentials come from the usual AWS chain.

    Example: regen verify s3://bucket/my-set
    """
    from rich.console import Console
    from rich.progress import Progress

    from tasks.upload.verify import verify

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        result = verify(
            where,
            lambda entry: bar.update(task, advance=1, description=entry.key),
            endpoint_url=endpoint_url,
            region=region,
        )
    for line in result.differences:
        click.echo(f"different: {line}")
    click.echo(f"{result.verdict}: {result.files:,} files, {result.bytes:,} bytes in {result.url}")
    click.echo(f"rows of all snapshots: {result.rows_text}" if result.kind == "published" else result.rows_text)
    payload = {
        "verdict": result.verdict,
        "url": result.url,
        "kind": result.kind,
        "files": result.files,
        "bytes": result.bytes,
        "rows": dict(result.rows),
        "differences": list(result.differences),
    }
    if result.differences:
        raise Outcome(payload, 3)
    return payload
