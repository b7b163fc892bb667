"""Names inside a published data set. The layout in a bucket is the layout on disk (see `tasks.runs`)."""

from collections.abc import Mapping
from typing import Any

from tasks.records import FileEntry

FORMAT = "drafter-regen.manifest/1"
MANIFEST = "manifest.json"
CARD = "README.md"
LEASE = "lease.json"
IDS = "ids.parquet"
PUBLISHED = "published.json"

CHUNK_FILES = {
    "completions.parquet": "completions",
    "failed.parquet": "failed",
    "tokens.parquet": "tokens",
    "tokens_rejected.parquet": "tokens_rejected",
    "chunk.json": "chunk",
}
"""Files of a chunk folder that are published, and their kind in the manifest."""

RUN_FILES = {
    "spec.json": "spec",
    "rejected.parquet": "rejected",
    "calibration.json": "calibration",
    "forecast.json": "forecast",
    "power.parquet": "power",
    "report.html": "report",
}
"""Files of a run folder that are published beside the data."""

OWN = (MANIFEST, CARD, LEASE, "baselines/", "runs/", "current", "calibration-", ".")
"""What may lie in a data set's root; anything else is somebody else's."""

CONVENTIONS = {
    "loss_mask": "1 where the target sampled the token; not shifted: loss_mask[i] belongs to input_ids[i], "
    "the trainer shifts",
    "supervised": "thinking, answer, tool calls and the end-of-turn token; the template's scaffold is not",
    "rows": "one row of tokens.parquet an assistant turn; one row of completions.parquet a prompt",
    "order": "prompts are in hash order of their ids: any prefix is a random sample",
    "files": "a snapshot is the files in `current`; other files below runs/ are unpublished or superseded",
    "removed_prompts": "a prompt that left its source stays published; only `force` replaces rows",
}


def chunk_prefix(run_id: str, index: int) -> str:
    """`runs/<run id>/chunks/00042/`."""
    return f"runs/{run_id}/chunks/{index:05d}/"


def part_id(run_id: str, index: int) -> str:
    """Name of a part in the manifest."""
    return f"{run_id}/{index:05d}"


def to_entry(value: Mapping[str, Any]) -> FileEntry:
    """A FileEntry from its JSON form."""
    return FileEntry(
        str(value["key"]), int(value["bytes"]), str(value["sha256"]), value.get("rows"), str(value.get("kind", ""))
    )
