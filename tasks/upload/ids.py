"""Which prompts a run settled, one small Parquet file a snapshot: what a later run need not do again."""

from pathlib import Path

import polars as pl

from tasks.runs import RunPaths

SCHEMA = {
    "prompt_id": pl.String,
    "chunk": pl.Int32,
    "outcome": pl.String,
    "reason": pl.String,
    "regenerate_reason": pl.String,
}
"""`outcome` is completed, failed or rejected (answered, but its training row was refused); `reason` says why."""


def collect_ids(paths: RunPaths, chunks: list[int]) -> pl.DataFrame:
    """One row a prompt of `chunks`, sorted by id."""
    frames = [frame for index in chunks for frame in _chunk(paths.chunk(index), index)]
    ids = (
        pl.concat(frames)
        if frames
        else pl.DataFrame(schema={k: v for k, v in SCHEMA.items() if k != "regenerate_reason"})
    )
    # A prompt may have several training rows; it is rejected only when none of its turns stayed.
    ids = ids.sort("prompt_id", "outcome").unique("prompt_id", keep="first", maintain_order=True)
    if paths.prompts.exists():
        why = pl.read_parquet(paths.prompts, columns=["prompt_id", "regenerate_reason"])
        ids = ids.join(why.cast(pl.String), on="prompt_id", how="left", maintain_order="left")
    else:
        ids = ids.with_columns(regenerate_reason=pl.lit(None, pl.String))
    return ids.select(pl.col(name).cast(kind) for name, kind in SCHEMA.items())


def _chunk(folder: Path, index: int) -> list[pl.DataFrame]:
    completed = _read(folder / "completions.parquet", index, "completed")
    failed = _read(folder / "failed.parquet", index, "failed")
    refused = _read(folder / "tokens_rejected.parquet", index, "rejected")
    tokens = folder / "tokens.parquet"
    if tokens.exists() and refused.height:
        kept = pl.read_parquet(tokens, columns=["prompt_id"]).unique()
        refused = refused.join(kept, on="prompt_id", how="anti").unique("prompt_id", keep="first")
        completed = completed.join(refused, on="prompt_id", how="anti")
    return [completed, failed, refused] if tokens.exists() else [completed, failed]


def _read(path: Path, index: int, outcome: str) -> pl.DataFrame:
    schema = {"prompt_id": pl.String, "chunk": pl.Int32, "outcome": pl.String, "reason": pl.String}
    if not path.exists():
        return pl.DataFrame(schema=schema)
    names = pl.read_parquet_schema(path)
    reason = pl.col("reason").cast(pl.String) if "reason" in names else pl.lit(None, pl.String)
    frame = pl.scan_parquet(path).select("prompt_id", reason=reason)
    return frame.select(
        pl.col("prompt_id").cast(pl.String),
        pl.lit(index, pl.Int32).alias("chunk"),
        pl.lit(outcome).alias("outcome"),
        pl.col("reason"),
    ).collect()
