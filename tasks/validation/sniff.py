"""What a file is, by its first bytes: names lie, magic numbers do not."""

import codecs
import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO, Literal

import orjson
import zstandard

from tasks.errors import DatasetError

Format = Literal["jsonl", "json", "parquet", "arrow"]
Compression = Literal["", "gzip", "zstd"]

HEAD_BYTES = 1 << 16
MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"%PDF", "a PDF"),
    (b"\x7fELF", "a program"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ", "an xz file"),
    (b"SQLite format 3", "an SQLite database"),
    (b"\x80\x04", "a Python pickle"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    (codecs.BOM_UTF16_LE, "UTF-16 text"),
    (codecs.BOM_UTF16_BE, "UTF-16 text"),
)
EXPECTED = "expected JSONL (plain, .gz, .zst), JSON, Parquet or Arrow"


def sniff(path: Path, label: str) -> tuple[Format, Compression]:
    """(format, compression). Raises DatasetError for an empty, unreadable or binary file."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise DatasetError(f"cannot read {label}: {error.strerror or error}") from error
    if not head:
        raise DatasetError(f"{label} is empty: 0 bytes; {EXPECTED}")
    if head.startswith(b"PAR1"):
        return "parquet", ""
    if head.startswith(b"ARROW1") or (head.startswith(b"\xff\xff\xff\xff") and path.suffix != ".jsonl"):
        return "arrow", ""
    compression: Compression = ""
    if head.startswith(b"\x1f\x8b"):
        compression = "gzip"
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        compression = "zstd"
    if compression:
        head = _inflated_head(path, label, compression)
    _refuse_binary(head, label)
    return _text_format(head, label), compression


def open_text(path: str, compression: Compression) -> BinaryIO:
    """The file's bytes, decompressed while they are read."""
    if compression == "gzip":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    raw = Path(path).open("rb")  # noqa: SIM115 - the caller closes it
    if compression == "zstd":
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(reader, 1 << 20)  # type: ignore[arg-type]
    return raw


def _inflated_head(path: Path, label: str, compression: Compression) -> bytes:
    try:
        with open_text(str(path), compression) as file:
            head = file.read(HEAD_BYTES)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DatasetError(f"cannot decompress {label} ({compression}): {error}; the file is damaged") from error
    if not head:
        raise DatasetError(f"{label} is empty after decompression; {EXPECTED}")
    return head


def _refuse_binary(head: bytes, label: str) -> None:
    for magic, what in MAGIC:
        if head.startswith(magic):
            raise DatasetError(f"{label} is {what}; {EXPECTED}")
    if b"\0" in head and not any(_is_json(line) for line in head.split(b"\n")):
        raise DatasetError(f"{label} is binary (it starts with {head[:8]!r}); {EXPECTED}")


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _text_format(head: bytes, label: str) -> Format:
    """JSON where the file is one array or one object over several lines, else JSON lines, whatever its name."""
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not text:
        raise DatasetError(f"{label} holds only white space; {EXPECTED}")
    first_line = text.split(b"\n", 1)[0]
    named_json = label.removesuffix(".gz").removesuffix(".zst").endswith(".json")
    if text.startswith(b"[") and (named_json or not _is_array(first_line)):
        return "json"
    if named_json and text.startswith(b"{") and not _is_json(first_line) and len(head) > len(first_line) + 1:
        return "json"
    return "jsonl"


def _is_array(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), list)
    except orjson.JSONDecodeError:
        return False
