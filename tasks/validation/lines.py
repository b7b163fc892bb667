"""JSONL: blocks cut at `\\n` only, and lines that are rows or rejects, whatever their bytes.

U+2028 and U+0085 inside a string are text. A byte order mark at the start is dropped, `\\r` before `\\n` is white
space of JSON, an empty line is no row.
"""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson

from tasks.validation.reasons import Reason, RowError

BLOCK_BYTES = 8 << 20
"""Of one unit of work: large against the cost of handing it over (about 1 ms), small against memory."""

_BIG_INTEGER = re.compile(rb"[0-9]{19}")


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of one file. `data` is None where a worker can read them itself; `oversize` is one endless line."""

    start: int
    length: int
    first_row: int
    lines: int
    data: bytes | None = None
    oversize: bool = False
    last: bool = False


def cut_blocks(file: BinaryIO, *, keep_data: bool, max_line: int, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Blocks of whole lines. Holds at most one block, or one line of `max_line` bytes."""
    start = row = 0
    held = bytearray()
    while True:
        chunk = file.read(block_bytes)
        if not chunk:
            break
        end = chunk.rfind(b"\n") + 1
        if not end:
            held += chunk
            if len(held) > max_line:
                length, ended = _skip_line(file, len(held))
                yield Block(start, length, row, 1, oversize=True, last=not ended)
                start, row, held = start + length, row + 1, bytearray()
            continue
        data = bytes(held) + chunk[:end]
        lines = data.count(b"\n")
        yield Block(start, len(data), row, lines, data if keep_data else None)
        start, row, held = start + len(data), row + lines, bytearray(chunk[end:])
    if held:
        yield Block(start, len(held), row, 1, bytes(held) if keep_data else None, last=True)


def _skip_line(file: BinaryIO, seen: int) -> tuple[int, bool]:
    """Read on to the end of an endless line without keeping it. Returns (its length, whether a newline ended it)."""
    while piece := file.readline(1 << 20):
        seen += len(piece)
        if piece.endswith(b"\n"):
            return seen, True
    return seen, False


def rows(data: bytes, first_row: int, *, max_line: int, last: bool) -> Iterator[tuple[int, Any]]:
    """(row, value or RowError) of every line that is not empty. Never raises, whatever the bytes."""
    if first_row == 0 and data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
    lines = data.split(b"\n")
    torn = len(lines) - 1 if last and lines[-1] else -1
    for number, line in enumerate(lines):
        if not line or line.isspace():
            continue
        try:
            if len(line) > max_line:
                raise RowError(Reason.LINE_TOO_LONG, f"{len(line)} bytes, the limit is {max_line}")
            yield first_row + number, parse(line)
        except RowError as error:
            if number == torn and error.reason is Reason.INVALID_JSON:
                error = RowError(Reason.TORN_LINE, error.detail)
            yield first_row + number, error


def parse(line: bytes) -> Any:
    """The value of one line. Raises RowError, and nothing else, for any bytes."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _why(line, error) from error
    if b"tool" in line and _BIG_INTEGER.search(line):
        return _exact(line)
    return value


def _exact(line: bytes) -> Any:
    """orjson turns integers beyond 64 bits into floats; arguments of tools must stay exact."""
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RowError(Reason.INVALID_JSON, str(error)) from error
    return value


def _why(line: bytes, error: Exception) -> RowError:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as wrong:
        return RowError(Reason.INVALID_UTF8, f"byte {wrong.object[wrong.start]:#04x} at position {wrong.start}")
    if "surrogate" in str(error) and re.search(r"\\u[dD][89a-fA-F]", text):
        return RowError(Reason.LONE_SURROGATE, str(error))
    return RowError(Reason.INVALID_JSON, str(error))
