"""Ids whose answers exist already, from a container or a file."""

from collections.abc import Container
from pathlib import Path

import polars as pl

from tasks.errors import DatasetError


def read_ids(found: Container[str] | Path | None) -> Container[str]:
    """A container of ids. A path is a Parquet file with `prompt_id`, or text with one id a line."""
    if found is None:
        return frozenset()
    if not isinstance(found, Path):
        return found
    try:
        if found.suffix == ".parquet":
            return frozenset(pl.read_parquet(found, columns=["prompt_id"])["prompt_id"].drop_nulls())
        return frozenset(found.read_text(encoding="utf-8").split())
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DatasetError(f"cannot read the ids in {found}: {error}") from error
