"""`regen export`: a run's rows in the form that a trainer reads."""

import tempfile
from pathlib import Path
from typing import Any

import click

TRAINERS = (
    "specforge",
    "specforge-raw",
    "speculators",
    "speculators-prepared",
    "model-optimizer",
    "automodel",
    "torchspec",
    "deepspec",
    "angelslim",
)


@click.command(name="export")
@click.argument("run_or_tokens")
@click.option("--trainer", type=click.Choice(TRAINERS), required=True, help="Whose form is written.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="An empty or new folder.")
@click.option("--shard-rows", type=click.IntRange(1), help="Rows a file; default: what suits the trainer.")
@click.option("--seq-length", type=click.IntRange(1), help="The trainer's own window, to count what it will drop.")
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="The drafter's block.")
@click.option("--s3-endpoint-url", help="For s3:// sources that are not AWS.")
def command(
    run_or_tokens: str,
    trainer: str,
    out: Path,
    shard_rows: int | None,
    seq_length: int | None,
    block_size: int,
    s3_endpoint_url: str | None,
) -> dict[str, Any]:
    """Write the rows of RUN_OR_TOKENS in the form that a trainer reads.

    RUN_OR_TOKENS is a run or a published data set (folder or s3:// URL), a chunk folder, or a tokens.parquet. Says how
    many rows the trainer's own filter will drop. Refused (exit status 2) where a turn is in the files twice, as in two
    copies of one run. The last line of stdout is one JSON object.

    Example: regen export out/demo --trainer speculators --out out/speculators --shard-rows 50000
    """
    from tasks.tokenization.export.run import as_dict, export

    with tempfile.TemporaryDirectory(prefix="regen-export-") as folder:
        path = _local(run_or_tokens, Path(folder), s3_endpoint_url)
        result = export(path, trainer, out, shard_rows=shard_rows, seq_length=seq_length, block=block_size)
    click.echo(f"{result.rows:,} rows in {result.files} files for {trainer} ({result.note})", err=True)
    click.echo(result.dropped_text, err=True)
    return as_dict(result)


def _local(source: str, folder: Path, endpoint_url: str | None) -> Path:
    """The source as a local path; from a store only the manifest, tokens and completions are fetched."""
    if "://" not in source:
        return Path(source).expanduser()
    from tasks.storage import open_store

    store = open_store(source, endpoint_url=endpoint_url)
    wanted = ("manifest.json", "tokens.parquet", "completions.parquet")
    for key, _ in store.list(""):
        if key.rsplit("/", 1)[-1] in wanted:
            store.download(key, folder / key)
    return folder
