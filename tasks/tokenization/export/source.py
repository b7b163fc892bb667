"""Finds the token and completion files of a run, a chunk, a published data set or a folder, and reads them together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import DatasetError
from tasks.records import Message
from tasks.tokenization.export.checks import ARRAYS, check_rows
from tasks.tokenization.items import answer_positions

BATCH_ROWS = 512


@dataclass(frozen=True, slots=True)
class Part:
    """One chunk: its tokens, and the completions they were made from where those lie beside them."""

    tokens: Path
    completions: Path | None


@dataclass(frozen=True, slots=True)
class ChatRow:
    """One conversation for trainers that read messages; `turn` is its last accepted assistant turn."""

    prompt_id: str
    turn: int
    messages: list[dict[str, Any]]
    tools: str | None


class Source:
    """Everything an exporter reads. Rows are those that tokenization accepted."""

    def __init__(self, path: Path) -> None:
        self.parts = find_parts(path)
        self.path = path

    @cached_property
    def family(self) -> Mapping[str, Any]:
        """The template family that the tokens were made with, as recorded in their files."""
        for part in self.parts:
            text = (pq.read_metadata(part.tokens).metadata or {}).get(b"regen.fingerprint_of")
            if text:
                family: Mapping[str, Any] = orjson.loads(text)["family"]
                return family
        return {}

    def batches(self, *more: str) -> Iterator[pa.RecordBatch]:
        """Token rows of every part in order, with the arrays, ids and turns and the columns in `more`.

        Raises DatasetError at the first row whose arrays no tokenization wrote.
        """
        columns = ["prompt_id", "turn", *ARRAYS, *more]
        for part in self.parts:
            row = 0
            with pq.ParquetFile(part.tokens) as file:
                columns_here = [name for name in columns if name in file.schema_arrow.names]
                for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns_here):
                    check_rows(batch, part.tokens, row)
                    yield batch
                    row += batch.num_rows

    def chats(self, every_turn: bool) -> Iterator[ChatRow]:
        """Conversations with an accepted answer.

        With `every_turn`, one a turn that ends with it (for trainers that supervise the last turn only); else one a
        prompt that ends with its last accepted turn. Raises DatasetError when completions are missing.
        """
        for part in self.parts:
            if part.completions is None:
                raise DatasetError(
                    f"no completions.parquet beside {part.tokens}; this trainer reads messages: "
                    "export from the run or the published data set, not from its token files alone"
                )
            accepted = _accepted(part.tokens)
            with pq.ParquetFile(part.completions) as file:
                for batch in file.iter_batches(BATCH_ROWS, columns=["prompt_id", "messages", "tools", "turns"]):
                    for row in _without_ids(batch).to_pylist():
                        turns = accepted.get(row["prompt_id"], [])
                        for turn in turns if every_turn else turns[-1:]:
                            messages = up_to(row, turn)
                            if messages:
                                yield ChatRow(row["prompt_id"], turn, messages, row["tools"])

    def turn_details(self, part: Part) -> dict[tuple[str, int], dict[str, Any]]:
        """What the server said about each turn of a part, without ids; empty without completions."""
        if part.completions is None:
            return {}
        found: dict[tuple[str, int], dict[str, Any]] = {}
        with pq.ParquetFile(part.completions) as file:
            names = [n for n in ("prompt_id", "turns", "temperature", "top_p", "top_k") if n in file.schema_arrow.names]
            for batch in file.iter_batches(BATCH_ROWS, columns=names):
                for row in _without_ids(batch).to_pylist():
                    shared = {name: row.get(name) for name in ("temperature", "top_p", "top_k")}
                    found.update({(row["prompt_id"], t["turn"]): {**t, **shared} for t in row["turns"]})
        return found


def find_parts(path: Path) -> list[Part]:
    """Token files under `path`, those of the newest snapshot where it, or one folder below it, holds a manifest.

    Raises DatasetError when there are none, or when several published data sets lie below `path`.
    """
    if not path.exists():
        raise DatasetError(f"{path} does not exist; name a run, a chunk, a published data set or a tokens.parquet")
    if path.is_file():
        files = [path]
    else:
        published = _published(_data_set(path))
        files = published if published is not None else sorted(path.rglob("*.parquet"))
    found = [file for file in files if not file.name.startswith(".") and _is_tokens(file)]
    if not found:
        raise DatasetError(f"no token file under {path}: expected tokens.parquet with input_ids and loss_mask")
    return [Part(file, _sibling(file)) for file in found]


def refuse_repeats(parts: Sequence[Part]) -> None:
    """Raise DatasetError naming both folders when an answered turn is in the token files twice: trained on twice."""
    with_turns = [(n, part) for n, part in enumerate(parts) if "turn" in pq.read_schema(part.tokens).names]
    if not with_turns:
        return
    rows = pl.concat([pl.scan_parquet(p.tokens).select("prompt_id", "turn", part=pl.lit(n)) for n, p in with_turns])
    places = pl.col("part").sort()
    twice = rows.group_by("prompt_id", "turn").agg(first=places.first(), other=places.last(), n=pl.len())
    repeated = twice.filter(pl.col("n") > 1).sort("first", "other", "prompt_id", "turn").collect()
    if repeated.height:
        row = repeated.row(0, named=True)
        first, other = (parts[row[name]].tokens.parent for name in ("first", "other"))
        places_text = f"{first} and again in {other}" if first != other else f"{first} more than once"
        raise DatasetError(
            f"{repeated.height:,} answered turns are there more than once, first turn {row['turn']} of prompt "
            f"{row['prompt_id']}: in {places_text}; export one run, or the published data set (the folder with "
            "manifest.json), which holds each once"
        )


def _data_set(path: Path) -> Path:
    """`path`, or the one published data set below it: a work folder holds each row twice, as run and as published."""
    if (path / "manifest.json").is_file():
        return path
    found = sorted(file.parent for file in path.rglob("manifest.json"))
    if len(found) > 1:
        raise DatasetError(f"{path} holds {len(found)} published data sets; name one: {', '.join(map(str, found))}")
    return found[0] if found else path


def _published(path: Path) -> list[Path] | None:
    """Token files that the manifest calls current; None where there is no manifest."""
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return None
    try:
        keys = orjson.loads(manifest.read_bytes())["current"]["files"].get("tokens", [])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"{manifest} is not a data set's manifest: {error}; run `regen verify` on it") from error
    return [path / key for key in keys]


def _is_tokens(path: Path) -> bool:
    try:
        names = set(pq.read_schema(path).names)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"cannot read {path}: {error}; tokenize the chunk again") from error
    return {"prompt_id", *ARRAYS} <= names


def _sibling(tokens: Path) -> Path | None:
    beside = tokens.with_name(tokens.name.replace("tokens", "completions"))
    return beside if beside != tokens and beside.is_file() else None


def _accepted(tokens: Path) -> dict[str, list[int]]:
    table = pq.read_table(tokens, columns=["prompt_id", "turn"])
    found: dict[str, list[int]] = {}
    for prompt_id, turn in zip(table["prompt_id"].to_pylist(), table["turn"].to_pylist(), strict=True):
        found.setdefault(prompt_id, []).append(turn)
    return {prompt_id: sorted(turns) for prompt_id, turns in found.items()}


def _without_ids(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Drop the token ids inside `turns`: they would become millions of Python integers."""
    index = batch.schema.get_field_index("turns")
    turns = batch.column(index)
    flat = turns.flatten()
    names = [field.name for field in flat.type if not pa.types.is_large_list(field.type)]
    slim = pa.StructArray.from_arrays([flat.field(name) for name in names], names)
    lengths = turns.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets = pa.array([0, *lengths.cumsum().tolist()], pa.int32())
    return batch.set_column(index, "turns", pa.ListArray.from_arrays(offsets, slim))


def up_to(row: Mapping[str, Any], turn: int) -> list[dict[str, Any]]:
    """Messages through the answer of `turn`; empty when the conversation does not hold it."""
    messages = [Message(**message) for message in row["messages"]]
    positions = answer_positions(messages, [entry["content"] for entry in row["turns"]])
    order = next((index for index, entry in enumerate(row["turns"]) if entry["turn"] == turn), None)
    at = positions[order] if order is not None else None
    return [] if at is None else [message.as_dict() for message in messages[: at + 1]]
