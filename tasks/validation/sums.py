"""The proof that no row was lost: by id (source and row number), not by count."""

from pathlib import Path

import polars as pl

from tasks.errors import VerificationError


def prove(prompts: Path, kept_tokens: Path, rejected: Path, rows: int) -> None:
    """Every row read ends in exactly one place. Raises VerificationError naming the first that does not."""
    kept = pl.scan_parquet(prompts).filter(pl.col("sample_index") == 0).select("source", "row")
    frames = [kept, pl.scan_parquet(rejected).select("source", "row")]
    if kept_tokens.exists():
        frames.append(pl.scan_parquet(kept_tokens).select("source", "row"))
    ends = pl.concat(frames).with_columns(pl.col("source").cast(pl.Categorical)).collect()
    twice = ends.filter(ends.is_duplicated())
    if len(twice):
        source, row = twice.row(0)
        raise VerificationError(f"row {row} of {source} ended in two places at once; this is a bug, please report it")
    if len(ends) != rows:
        raise VerificationError(
            f"{rows} rows were read but {len(ends)} ended as kept, rejected or duplicate; please report this bug"
        )
