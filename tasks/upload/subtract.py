"""Only what is new: accepted prompts less those that are published, with the sums that prove it."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tasks.upload.published import without_forced


@dataclass(frozen=True, slots=True)
class Subtraction:
    """Prompts of the source by what happens to them, and published ones that left the source.

    `vanished` prompts stay published: rows are never removed because a source shrank.
    """

    accepted: int
    new: int
    already: int
    forced: int
    vanished: int


def subtract(
    prompts: Path,
    out: Path,
    published: pl.DataFrame,
    force_ids: Collection[str] = (),
    force_reasons: Collection[str] = (),
) -> Subtraction:
    """Write the prompts of `prompts` that are not in `published` (see `published_table`) to `out`, order kept.

    `out` may be `prompts` itself. accepted = new + already, where forced ones count as new.
    """
    settled = without_forced(published, force_ids, force_reasons).select("prompt_id")
    accepted = pl.scan_parquet(prompts)
    ids = accepted.select("prompt_id").collect()
    fresh = accepted.join(settled.lazy(), on="prompt_id", how="anti", maintain_order="left")
    part = out.with_name(f".{out.name}.part")
    fresh.sink_parquet(part, compression="zstd", maintain_order=True)
    part.replace(out)
    new = int(pl.scan_parquet(out).select(pl.len()).collect().item())
    forced = ids.join(published.select("prompt_id"), on="prompt_id", how="semi").height
    already = ids.join(settled, on="prompt_id", how="semi").height
    vanished = published.select("prompt_id").join(ids, on="prompt_id", how="anti").height
    return Subtraction(ids.height, new, already, forced - already, vanished)
