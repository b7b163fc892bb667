"""The little of Thrift's compact protocol that Parquet's page headers and footers need.

Source of the encoding: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


def read_struct(data: Any, at: int) -> tuple[dict[int, Any], int]:
    """({field number: value}, position after it). Raises IndexError at the end of `data`, ValueError for a map."""
    found: dict[int, Any] = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return found, at
        if head >> 4:
            number += head >> 4
        else:
            number, at = _zigzag(data, at)
        kind = head & 15
        if kind in (TRUE, FALSE):
            found[number] = kind == TRUE
        else:
            found[number], at = _value(data, at, kind)


def varint(data: Any, at: int) -> tuple[int, int]:
    """(an unsigned number, position after it)."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _zigzag(data: Any, at: int) -> tuple[int, int]:
    value, at = varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _value(data: Any, at: int, kind: int) -> tuple[Any, int]:
    if kind in (I16, I32, I64):
        return _zigzag(data, at)
    if kind == BINARY:
        size, at = varint(data, at)
        return bytes(data[at : at + size]), at + size
    if kind == STRUCT:
        return read_struct(data, at)
    if kind in (LIST, SET):
        head = data[at]
        size, at = (head >> 4, at + 1) if head >> 4 != 15 else varint(data, at + 1)
        items = []
        for _ in range(size):
            item, at = _value(data, at, head & 15)
            items.append(item)
        return items, at
    sizes = {TRUE: 1, FALSE: 1, BYTE: 1, DOUBLE: 8}
    if kind not in sizes:
        raise ValueError(f"a Parquet page header has a field of Thrift type {kind}, which none has")
    return bytes(data[at : at + sizes[kind]]), at + sizes[kind]


def write_struct(fields: Mapping[int, tuple[int, Any]]) -> bytes:
    """A struct of {field number: (type, value)}, numbers ascending; a list's value is (type of items, items)."""
    out = bytearray()
    before = 0
    for number, (kind, value) in fields.items():
        out.append((number - before) << 4 | kind)  # no field of Parquet's structs is 16 or more after the last
        out += _written(kind, value)
        before = number
    return bytes(out + b"\0")


def _written(kind: int, value: Any) -> bytes:
    if kind in (I32, I64):
        return _wide(value << 1 if value >= 0 else (-value << 1) - 1)
    if kind == BINARY:
        return _wide(len(value)) + bytes(value)
    if kind == STRUCT:
        return bytes(value)
    item_kind, items = value
    return _list(item_kind, items)


def _list(kind: int, items: Sequence[Any]) -> bytes:
    head = bytes([len(items) << 4 | kind]) if len(items) < 15 else bytes([0xF0 | kind]) + _wide(len(items))
    return head + b"".join(_written(kind, item) for item in items)


def _wide(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
