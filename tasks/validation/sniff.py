"""What a file is, by its first bytes: names lie, magic numbers do not."""

import codecs
from pathlib import Path
from typing import Literal

import orjson

from tasks.errors import DatasetError
from tasks.validation.compressed import READ_ERRORS, Compression, open_text

Format = Literal["jsonl", "json", "parquet", "arrow"]

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
    is_object = head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
    only_line = is_object and _named(label, ".json") and _is_one_line(str(path), compression)
    return _text_format(head, label, only_line), compression


def _inflated_head(path: Path, label: str, compression: Compression) -> bytes:
    try:
        with open_text(str(path), compression) as file:
            head = file.read(HEAD_BYTES)
    except READ_ERRORS as error:
        raise DatasetError(f"cannot decompress {label} ({compression}): {error}; the file is damaged") from error
    if not head:
        raise DatasetError(f"{label} is empty after decompression; {EXPECTED}")
    return head


def _refuse_binary(head: bytes, label: str) -> None:
    for magic, what in MAGIC:
        if head.startswith(magic):
            raise DatasetError(f"{label} is {what}; {EXPECTED}")
    long_row = head.startswith(b"{") and b"\n" not in head and len(head) == HEAD_BYTES
    if b"\0" in head and not long_row and not any(_is_json(line) for line in head.split(b"\n")):
        raise DatasetError(f"{label} is binary (it starts with {head[:8]!r}); {EXPECTED}")


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _named(label: str, suffix: str) -> bool:
    return label.removesuffix(".gz").removesuffix(".zst").endswith(suffix)


def _is_one_line(path: str, compression: Compression) -> bool:
    """Whether there is nothing but white space behind the first line."""
    try:
        with open_text(path, compression) as file:
            seen = False
            while piece := file.read(1 << 20):
                rest = piece if seen else piece.partition(b"\n")[2]
                seen = seen or b"\n" in piece
                if seen and rest.strip():
                    return False
    except READ_ERRORS:
        return False  # said where it is read in earnest
    return True


def _text_format(head: bytes, label: str, only_line: bool = False) -> Format:
    """JSON where the file is one array or one object (`only_line`: on the only line), else JSON lines, whatever its
    name. A broken first line does not turn whole lines into a document.
    """
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not text:
        raise DatasetError(f"{label} holds only white space; {EXPECTED}")
    first_line = text.split(b"\n", 1)[0]
    named_json = _named(label, ".json")
    if only_line:
        return "json"
    if first_line.strip() not in (b"[", b"{") and _are_lines(text):
        return "jsonl"
    if text.startswith(b"[") and (named_json or not _is_array(first_line)):
        return "json"
    if named_json and text.startswith(b"{") and not _is_json(first_line) and len(head) > len(first_line) + 1:
        return "json"
    return "jsonl"


def _are_lines(text: bytes) -> bool:
    """Whether rows stand on lines of their own: two of them, and none that goes on with a comma as in an array."""
    lines = [line.strip() for line in text.split(b"\n")[1:40]]
    return sum(map(_is_json, lines)) >= 2 and not any(_is_json(line[:-1]) for line in lines if line.endswith(b","))


def _is_array(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), list)
    except orjson.JSONDecodeError:
        return False
