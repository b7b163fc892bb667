"""From what people name (files, folders, globs, s3://, hf://) to files whose format is known by their content."""

import fnmatch
import glob
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.errors import DatasetError
from tasks.validation.columns import CHAT_COLUMNS, ID_COLUMNS, schema_of
from tasks.validation.remote import from_bucket, from_hub
from tasks.validation.settings import SourceSettings
from tasks.validation.sniff import sniff
from tasks.validation.units import Source

log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".feather", ".gz", ".zst")
"""What is taken from a folder; a file that is named itself may be called anything."""

NOT_DATA = frozenset({"dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json"})

READ_COLUMNS = frozenset({"input_ids", "loss_mask", "labels", *CHAT_COLUMNS, *ID_COLUMNS})
"""Columns that are read where a column store has them."""


def resolve(settings: SourceSettings, downloads: Path) -> list[Source]:
    """Every input file once, in the order given. `downloads` holds what came from a bucket or a hub.

    Raises DatasetError, one clear sentence, for whatever cannot be read as a whole.
    """
    files: list[tuple[str, str]] = []
    for path in settings.paths:
        found = list(_expand(path, settings, downloads))
        if not found:
            raise DatasetError(f"{path} matches nothing; expected a file, a folder, a glob, s3://… or hf://org/name")
        files += found
    if not files:
        raise DatasetError("no source was given; name at least one file, folder, glob, s3:// URL or hf:// id")
    return [_source(index, label, local) for index, (label, local) in enumerate(_once(files))]


def _once(files: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """`files` without those that were named before, whatever their path was spelled like."""
    taken: dict[str, str] = {}
    kept = []
    for label, local in files:
        place = label if "://" in label else str(Path(local).resolve())
        if place in taken:
            log.warning("%s was already named%s; it is read once", label, _as(taken[place], label))
            continue
        taken[place] = label
        kept.append((label, local))
    return kept


def _as(first: str, label: str) -> str:
    return f" as {first}" if first != label else ""


def _expand(path: str, settings: SourceSettings, downloads: Path) -> Iterator[tuple[str, str]]:
    """(label, local path) of every file that `path` stands for."""
    if path.startswith("s3://"):
        yield from from_bucket(path, settings, downloads, wanted)
    elif path.startswith("hf://"):
        yield from from_hub(path, settings, downloads)
    else:
        yield from ((name, name) for name in _local(path, settings.split))


def _local(path: str, split: str) -> list[str]:
    try:
        if Path(path).is_dir():
            return [str(file) for file in _folder(Path(path), split)]
        if Path(path).exists():
            return [path]
        if glob.has_magic(path):
            names = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - the pattern may be absolute
            return [file for name in names for file in _local(name, split)]
        hint = _hint(path)
    except OSError as error:
        reason = error.strerror or error
        raise DatasetError(f"cannot read {path}: {reason}; name a file or folder that can be read here") from error
    raise DatasetError(f"{path} does not exist{hint}")


def _hint(path: str) -> str:
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return f" here; for the Hugging Face data set write hf://{path}"
    folder = Path(path).parent
    if not folder.is_dir():
        return f": there is no folder {folder}"
    near = [p.name for p in sorted(folder.iterdir()) if fnmatch.fnmatch(p.name, f"*{Path(path).stem[:4]}*")][:3]
    return f"; {folder} has {', '.join(near)}" if near else ""


def wanted(name: str) -> bool:
    """Whether a file in a folder or a bucket is data."""
    base = name.rsplit("/", 1)[-1]
    return base.lower().endswith(SUFFIXES) and base not in NOT_DATA and not base.startswith((".", "_"))


def _folder(folder: Path, split: str) -> list[Path]:
    if (folder / "dataset_dict.json").exists():
        splits = _entries(folder / "dataset_dict.json", "splits", str)
        if split not in splits:
            raise DatasetError(f"{folder} has the splits {', '.join(splits)}, not {split!r}; set source.split")
        folder = folder / split
    state = folder / "state.json"
    if state.exists():
        names = [entry.get("filename") for entry in _entries(state, "_data_files", dict)]
        if not names or not all(isinstance(name, str) and name for name in names):
            raise _not_saved(state, "_data_files", f"_data_files with the file names {names}")
        return [folder / name for name in names]
    found = sorted(p for p in folder.rglob("*") if p.is_file() and wanted(p.name))
    if not found:
        raise DatasetError(f"{folder} holds no data files; expected {' '.join(SUFFIXES)}")
    return found


def _entries(path: Path, field: str, kind: type) -> list[Any]:
    """The list `field` of a file that `save_to_disk` writes. Raises DatasetError when it is not there."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _not_saved(path, field, f"no JSON ({error})") from error
    if not isinstance(value, dict):
        raise _not_saved(path, field, f"a {type(value).__name__}")
    entries = value.get(field)
    if not isinstance(entries, list) or not all(isinstance(entry, kind) for entry in entries):
        found = f"{field} {str(entries)[:80]}" if field in value else f"the fields {', '.join(value) or 'none'}"
        raise _not_saved(path, field, found)
    return entries


def _not_saved(path: Path, field: str, found: str) -> DatasetError:
    expected = "the names of the splits" if field == "splits" else "the names of the data files"
    return DatasetError(
        f"{path} holds {found}, expected a JSON object whose {field} lists {expected}, as save_to_disk writes it; "
        "save the data set again, or name its data files themselves"
    )


def _source(index: int, label: str, local: str) -> Source:
    kind, compression = sniff(Path(local), label)
    source = Source(index, label, local, kind, compression)
    if kind in ("jsonl", "json"):
        return source
    schema = schema_of(source)
    _refuse_doubled(source, schema)
    if "input_ids" not in schema.names:
        return source
    for name in ("input_ids", mask_column(source, schema)):
        _check_list(source, name, schema.field(name).type)
    return Source(index, label, local, kind, compression, tokenized=True)


def _refuse_doubled(source: Source, schema: pa.Schema) -> None:
    counts = Counter(schema.names)
    doubled = sorted(name for name in READ_COLUMNS & set(counts) if counts[name] > 1)
    if doubled:
        found = ", ".join(f"{name} ({counts[name]} times)" for name in doubled)
        raise DatasetError(
            f"{source.label} has columns of the same name: {found}; expected each once: "
            "rename or drop one, and write the file again"
        )


def mask_column(source: Source, schema: pa.Schema) -> str:
    """`loss_mask` or `labels`, whichever is there. Raises DatasetError."""
    for name in ("loss_mask", "labels"):
        if name in schema.names:
            return name
    found = ", ".join(schema.names[:12])
    raise DatasetError(f"{source.label} has input_ids but neither loss_mask nor labels (columns: {found})")


def _check_list(source: Source, name: str, kind: pa.DataType) -> None:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        raise DatasetError(f"{source.label}: column {name} is {kind}, expected a list of integers")
