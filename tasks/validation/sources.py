"""From what people name (files, folders, globs, s3://, hf://) to files whose format is known by their content."""

import fnmatch
import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tasks.errors import DatasetError
from tasks.validation.columns import schema_of
from tasks.validation.remote import from_bucket, from_hub
from tasks.validation.settings import SourceSettings
from tasks.validation.sniff import sniff
from tasks.validation.units import Source

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".feather", ".gz", ".zst")
"""What is taken from a folder; a file that is named itself may be called anything."""

NOT_DATA = frozenset({"dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json"})


def resolve(settings: SourceSettings, downloads: Path) -> list[Source]:
    """Every input file, in the order given. `downloads` holds what came from a bucket or a hub.

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
    return [_source(index, label, local) for index, (label, local) in enumerate(files)]


def _expand(path: str, settings: SourceSettings, downloads: Path) -> Iterator[tuple[str, str]]:
    """(label, local path) of every file that `path` stands for."""
    if path.startswith("s3://"):
        yield from from_bucket(path, settings, downloads, wanted)
    elif path.startswith("hf://"):
        yield from from_hub(path, settings, downloads)
    elif Path(path).is_dir():
        yield from ((str(file), str(file)) for file in _folder(Path(path), settings.split))
    elif Path(path).exists():
        yield path, path
    elif glob.has_magic(path):
        for name in sorted(glob.glob(path, recursive=True)):  # noqa: PTH207 - the pattern may be absolute
            yield from _expand(name, settings, downloads)
    else:
        raise DatasetError(f"{path} does not exist{_hint(path)}")


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
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        if split not in splits:
            raise DatasetError(f"{folder} has the splits {', '.join(splits)}, not {split!r}; set source.split")
        folder = folder / split
    state = folder / "state.json"
    if state.exists():
        names = [entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
        return [folder / name for name in names]
    found = sorted(p for p in folder.rglob("*") if p.is_file() and wanted(p.name))
    if not found:
        raise DatasetError(f"{folder} holds no data files; expected {' '.join(SUFFIXES)}")
    return found


def _source(index: int, label: str, local: str) -> Source:
    kind, compression = sniff(Path(local), label)
    source = Source(index, label, local, kind, compression)
    if kind in ("jsonl", "json"):
        return source
    schema = schema_of(source)
    if "input_ids" not in schema.names:
        return source
    for name in ("input_ids", mask_column(source, schema)):
        _check_list(source, name, schema.field(name).type)
    return Source(index, label, local, kind, compression, tokenized=True)


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
