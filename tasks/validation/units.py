"""Units of work: what one worker reads at a time, small enough to hand over and to hold."""

from dataclasses import dataclass
from typing import Literal

from tasks.validation.lines import Block


@dataclass(frozen=True, slots=True)
class Source:
    """One input file. `label` is what people see (the path or URL they gave), `path` is where its bytes are now."""

    index: int
    label: str
    path: str
    format: Literal["jsonl", "json", "parquet", "arrow"]
    compression: Literal["", "gzip", "zstd"] = ""
    tokenized: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of one source: a block of lines, a group of rows, or rows as JSON lines that came from elsewhere.

    `groups` are row groups of Parquet or record batches of Arrow; `rows` counts lines or rows, for limits.
    """

    index: int
    source: Source
    first_row: int
    rows: int
    weight_bytes: int
    block: Block | None = None
    groups: tuple[int, ...] = ()
    columnar: bool = False
