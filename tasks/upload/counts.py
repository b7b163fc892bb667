"""What a run's chunks add up to, read from the chunk folders."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from tasks.cuts import count_cuts
from tasks.runs import read_json


def chunk_counts(folder: Path) -> dict[str, Any]:
    """Sums of one chunk: prompts, done, failed, output and supervised tokens, training rows, cut answers, reasons."""
    record = read_json(folder / "chunk.json") if (folder / "chunk.json").exists() else {}
    counts: dict[str, Any] = {
        name: int(record.get(name) or 0) for name in ("prompts", "done", "failed", "output_tokens")
    }
    counts["failed_reasons"] = dict(record.get("failed_reasons") or {})
    counts |= {"rows": 0, "supervised_tokens": 0, "exact_rows": 0}
    tokens = folder / "tokens.parquet"
    if tokens.exists():
        names = pl.read_parquet_schema(tokens)
        supervised = pl.col("n_supervised").sum() if "n_supervised" in names else pl.lit(0)
        exact = pl.col("ids_exact").sum() if "ids_exact" in names else pl.lit(0)
        sums = pl.scan_parquet(tokens).select(pl.len().alias("rows"), s=supervised, e=exact).collect().row(0)
        counts |= {"rows": int(sums[0]), "supervised_tokens": int(sums[1] or 0), "exact_rows": int(sums[2] or 0)}
    if (folder / "completions.parquet").exists():
        counts |= count_cuts(folder / "completions.parquet")
    counts["rejected_reasons"] = _reasons(folder / "tokens_rejected.parquet")
    return counts


def total(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sums over chunks; reasons are added code by code."""
    sums: dict[str, Any] = {}
    for chunk in chunks:
        for name, value in chunk.items():
            if isinstance(value, dict):
                sums[name] = dict(Counter(sums.get(name, {})) + Counter(value))
            else:
                sums[name] = sums.get(name, 0) + value
    return sums


def _reasons(path: Path) -> dict[str, int]:
    if not path.exists() or "reason" not in pl.read_parquet_schema(path):
        return {}
    groups = pl.scan_parquet(path).group_by(pl.col("reason").cast(pl.String)).len().collect()
    return {str(reason): int(n) for reason, n in groups.rows()}
