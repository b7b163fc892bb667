"""Tool calls as targets write them, read back into OpenAI's list form. One small reader a format."""

import json
import re
from collections.abc import Callable
from typing import Any

Call = tuple[str, Any]
"""(function name, arguments as a JSON value)."""


def read_calls(text: str, tool_format: str, tool_call_open: str, tool_call_close: str) -> tuple[str, str | None]:
    """(text before the calls, calls as JSON text) or (`text`, None) when nothing in it is a well-formed call."""
    reader = READERS.get(tool_format)
    if reader is None:
        return text, None
    try:
        rest, calls = reader(text, tool_call_open, tool_call_close)
    except (ValueError, KeyError, TypeError, AttributeError):
        return text, None
    return (rest, as_json(calls)) if calls else (text, None)


def as_json(calls: list[Call]) -> str:
    """OpenAI's list form; arguments are JSON text, and ids count from 0 because targets do not sample ids."""
    entries = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    return json.dumps(entries, ensure_ascii=False)


def _blocks(text: str, opening: str, closing: str) -> tuple[str, list[str]]:
    if not opening or opening not in text:
        return text, []
    rest = text[: text.index(opening)].rstrip()
    return rest, re.findall(f"{re.escape(opening)}(.*?){re.escape(closing)}", text, re.DOTALL)


def _json_tags(text: str, opening: str, closing: str) -> tuple[str, list[Call]]:
    rest, blocks = _blocks(text, opening, closing)
    values = [json.loads(block) for block in blocks]
    return rest, [(value["name"], value.get("arguments", value.get("parameters", {}))) for value in values]


def _xml_function(text: str, opening: str, closing: str) -> tuple[str, list[Call]]:
    rest, blocks = _blocks(text, opening, closing)
    calls: list[Call] = []
    for block in blocks:
        for name, body in re.findall(r"<function=([^>\n]+)>(.*?)</function>", block, re.DOTALL):
            pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
            calls.append((name, {key: _value(value) for key, value in pairs}))
    return rest, calls


def _glm_arguments(text: str, opening: str, closing: str) -> tuple[str, list[Call]]:
    rest, blocks = _blocks(text, opening, closing)
    calls: list[Call] = []
    for block in blocks:
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", block, re.DOTALL)
        calls.append((block.split("<arg_key>")[0].strip(), {key: _value(value) for key, value in pairs}))
    return rest, [call for call in calls if call[0]]


def _deepseek(text: str, opening: str, closing: str) -> tuple[str, list[Call]]:
    rest, _ = _blocks(text, opening, closing)
    found = re.findall(r"<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n```<｜tool▁call▁end｜>", text, re.DOTALL)
    return rest, [(name, json.loads(arguments)) for name, arguments in found]


def _harmony(text: str, opening: str, closing: str) -> tuple[str, list[Call]]:
    found = re.findall(r"to=functions\.([\w.\-]+).*?<\|message\|>(.*?)(?:<\|call\|>|$)", text, re.DOTALL)
    rest = re.split(r"(?:<\|start\|>assistant|<\|channel\|>commentary)?\s*to=functions\.", text)[0]
    return rest, [(name, json.loads(arguments)) for name, arguments in found]


def _bare_json(text: str, opening: str, closing: str) -> tuple[str, list[Call]]:
    stripped = text.strip().removeprefix("<|python_tag|>")
    if not stripped.startswith('{"name"'):
        return text, []
    value = json.loads(stripped)
    return "", [(value["name"], value.get("parameters", value.get("arguments", {})))]


def _value(text: str) -> Any:
    """Parameters are written as bare text or as JSON; only JSON that is not a plain string is decoded."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value


READERS: dict[str, Callable[[str, str, str], tuple[str, list[Call]]]] = {
    "json_tags": _json_tags,
    "xml_function": _xml_function,
    "glm_arguments": _glm_arguments,
    "deepseek": _deepseek,
    "harmony": _harmony,
    "bare_json": _bare_json,
}
