"""Tool calls and tool lists: one fixed stored form, JSON text in one string column.

Objects inside a struct column would be padded with nulls for every key that another row has, and a column cannot
hold an object in one row and a string in the next. So both become text: OpenAI's list form, with `arguments` as
compact JSON text in the order it was written.
"""

import json
from typing import Any

import orjson

from tasks.validation.reasons import Reason, RowError


def dump(value: Any) -> str:
    """Compact JSON text, keys in their order; exact for integers that pass 64 bits."""
    try:
        return orjson.dumps(value).decode()
    except (orjson.JSONEncodeError, TypeError):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def load(text: str) -> Any:
    """Strict JSON from text, big integers exact. Raises ValueError."""
    if any(len(run) > 18 for run in _digit_runs(text)):
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate, which orjson refuses, is a ValueError here
        return value
    return orjson.loads(text)


def _digit_runs(text: str) -> list[str]:
    return "".join(c if c.isdigit() else " " for c in text).split()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def canonical_calls(value: Any, *, drop_nulls: bool = False) -> str | None:
    """`tool_calls` as JSON text, or None where there are none. `drop_nulls` removes a column store's padding."""
    if isinstance(value, str):
        value = _parsed(value, Reason.BAD_TOOL_CALL, "tool_calls") if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list):
        raise RowError(Reason.BAD_TOOL_CALL, f"tool_calls is {type(value).__name__}, expected a list")
    return dump([_call(call, drop_nulls) for call in value])


def _call(call: Any, drop_nulls: bool) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise RowError(Reason.BAD_TOOL_CALL, f"a tool call is {type(call).__name__}, expected an object")
    function = call.get("function") or call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError(Reason.BAD_TOOL_CALL, "a tool call has no function name")
    stored: dict[str, Any] = {"id": str(call["id"])} if call.get("id") is not None else {}
    stored["type"] = "function"
    stored["function"] = {"name": function["name"], "arguments": _arguments(function.get("arguments"), drop_nulls)}
    return stored


def _arguments(value: Any, drop_nulls: bool) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        return "{}"
    if isinstance(value, str):
        value = _parsed(value, Reason.BAD_TOOL_CALL, "arguments")
    if not isinstance(value, dict):
        raise RowError(Reason.BAD_TOOL_CALL, f"arguments is {type(value).__name__}, expected an object")
    return dump(_without_nulls(value) if drop_nulls else value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def canonical_tools(value: Any, *, drop_nulls: bool = False) -> str | None:
    """`tools` as JSON text, or None. Its items are the template's business and stay as they are."""
    if isinstance(value, str):
        value = _parsed(value, Reason.BAD_TOOLS, "tools") if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list):
        raise RowError(Reason.BAD_TOOLS, f"tools is {type(value).__name__}, expected a list")
    return dump(_without_nulls(value) if drop_nulls else value)


def _parsed(text: str, reason: Reason, what: str) -> Any:
    try:
        return load(text)
    except (ValueError, RecursionError) as error:
        raise RowError(reason, f"{what} is text that is not JSON: {error}") from error
