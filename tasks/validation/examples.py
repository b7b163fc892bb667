"""A few rejected rows of each reason: what a person looks at first."""

from pathlib import Path
from typing import Any

import polars as pl


def examples(rejected: Path, each: int = 3) -> list[dict[str, Any]]:
    """Up to `each` rows a reason: reason, source, row (from 0), id, detail, duplicate_of."""
    columns = ["reason", "source", "row", "id", "detail", "duplicate_of"]
    frame = pl.scan_parquet(rejected).select(columns)
    return frame.filter(pl.int_range(pl.len()).over("reason") < each).sort("reason").collect().to_dicts()
