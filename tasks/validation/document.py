"""A JSON file that is one document: an array of rows, one row, or an object that holds the rows."""

import json
import re
import zlib
from collections.abc import Iterator
from json import JSONDecodeError

import orjson
import zstandard

from tasks.errors import DatasetError
from tasks.validation.lines import Block
from tasks.validation.sniff import open_text
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
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DatasetError(f"cannot read {source.label} to its end: {error}; the file is damaged or cut") from error
    pieces = _pieces(data, source.label)
    row = 0
    while group := [piece for _, piece in zip(range(ROWS_A_BLOCK), pieces, strict=False)]:
        yield Block(0, sum(map(len, group)), row, len(group), b"\n".join(group) + b"\n")
        row += len(group)


def _pieces(data: bytes, label: str) -> Iterator[bytes]:
    try:
        value = orjson.loads(data.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError:
        yield from _scan(data, label)
        return
    if isinstance(value, dict):
        held = next((value[k] for k in ROW_KEYS if isinstance(value.get(k), list)), None)
        value = held if held and isinstance(held[0], dict) else [value]
    # Dumped again, so that no value holds a newline; big integers keep their text through the slow path.
    yield from (orjson.dumps(item) for item in value) if not _big(data) else _scan(data, label)


def _big(data: bytes) -> bool:
    return re.search(rb"[0-9]{19}", data) is not None and b"tool" in data


def _scan(data: bytes, label: str) -> Iterator[bytes]:
    """Row by row, as text: what one row holds cannot spoil the others. Values may stand in an array or one by one."""
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    decoder = json.JSONDecoder()
    at = _first_row(text, decoder)
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


def _first_row(text: str, decoder: json.JSONDecoder) -> int:
    """Where the first row begins: in an array, or in the array that an object keeps under one of ROW_KEYS."""
    at = _skip(text, 0, _SPACE)
    if text[at : at + 1] == "{":
        try:
            whole, _ = decoder.raw_decode(text, at)
        except (JSONDecodeError, RecursionError):
            return at
        for key in ROW_KEYS:
            rows = whole.get(key)
            if isinstance(rows, list) and rows and isinstance(rows[0], dict):
                for found in re.finditer(rf'"{key}"\s*:\s*\[', text):
                    if str(decoder.raw_decode(text, found.end() - 1)[0]) == str(rows):  # as text: NaN is not itself
                        return _skip(text, found.end(), _SPACE)
        return at
    return _skip(text, at, _SPACE + "[")


def _skip(text: str, at: int, what: str) -> int:
    while at < len(text) and text[at] in what:
        at += 1
    return at
