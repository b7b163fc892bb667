"""A JSON file that is one document: an array of rows, one row, or an object that holds the rows."""

import json
import re
from collections.abc import Iterator
from json import JSONDecodeError
from typing import Any

import orjson

from tasks.errors import DatasetError
from tasks.validation.compressed import READ_ERRORS, open_text
from tasks.validation.lines import Block
from tasks.validation.units import Source

ROW_KEYS = ("data", "rows", "train", "examples")
"""Where an object keeps its rows, when it is not a row itself."""

ROWS_A_BLOCK = 2000
_SPACE = " \t\r\n"


def document_blocks(source: Source) -> Iterator[Block]:
    """The rows of a JSON document as blocks of JSON lines: from here on it is read as JSONL is.

    A row that is not strict JSON (NaN, a lone surrogate) stays as it was written and is rejected alone.
    """
    try:
        with open_text(source.path, source.compression) as file:
            data = file.read()
    except READ_ERRORS as error:
        raise DatasetError(f"cannot read {source.label} to its end: {error}; the file is damaged or cut") from error
    pieces = _pieces(data)
    row = 0
    while group := [piece for _, piece in zip(range(ROWS_A_BLOCK), pieces, strict=False)]:
        yield Block(0, sum(map(len, group)), row, len(group), b"\n".join(group) + b"\n")
        row += len(group)


def _pieces(data: bytes) -> Iterator[bytes]:
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = None
    if value is not None and not _big(data):
        # Dumped again, so that no value holds a newline.
        yield from map(orjson.dumps, _rows_of(value))
    elif (held := _lenient_object(data)) is not None:
        # As JSON lines that say the same: NaN, lone surrogates and big integers stay what they are.
        yield from (json.dumps(item).encode() for item in _rows_of(held))
    else:
        yield from _scan(data)


def _rows_of(value: Any) -> list[Any]:
    """The rows of a document: an array's items, what an object holds under one of ROW_KEYS, or the value itself."""
    if isinstance(value, list):
        return value
    lists = [value[key] for key in ROW_KEYS if isinstance(value.get(key), list)] if isinstance(value, dict) else []
    return lists[0] if lists and lists[0] and isinstance(lists[0][0], dict) else [value]


def _lenient_object(data: bytes) -> dict[str, Any] | None:
    """One object that Python reads and orjson does not read exactly; an array is cut row by row instead."""
    if not data.lstrip().startswith(b"{"):
        return None
    try:
        value = json.loads(data.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _big(data: bytes) -> bool:
    return re.search(rb"[0-9]{19}", data) is not None and b"tool" in data


def _scan(data: bytes) -> Iterator[bytes]:
    """Row by row, as text: what one row holds cannot spoil the others. Values may stand in an array or one by one."""
    text = data.decode("utf-8", "surrogateescape")
    decoder = json.JSONDecoder()
    at = _skip(text, 0, _SPACE + "[")
    while at < len(text) and text[at] != "]":
        try:
            _, end = decoder.raw_decode(text, at)
        except (JSONDecodeError, RecursionError):
            # Nothing after this point can be cut into rows: it ends as one reject.
            yield b" ".join(text[at : at + 4096].encode("utf-8", "surrogateescape").split()) or b"?"
            return
        piece = text[at:end].encode("utf-8", "surrogateescape")
        yield piece.replace(b"\n", b" ").replace(b"\r", b" ")
        at = _skip(text, end, _SPACE + ",")


def _skip(text: str, at: int, what: str) -> int:
    while at < len(text) and text[at] in what:
        at += 1
    return at
