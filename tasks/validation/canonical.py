"""Whatever people have becomes one canonical form: a tuple of (role, content, reasoning, calls, call id, name).

Plain tuples rather than `Message` objects: a set of a million rows builds millions of them (about 0.3 µs against
1.2 µs for a frozen dataclass), and they go straight into Arrow columns.
"""

from typing import Any

import orjson

from tasks.validation.calls import canonical_calls, canonical_tools
from tasks.validation.reasons import Reason, RowError

Turn = tuple[str, str, str | None, str | None, str | None, str | None]
"""role, content, reasoning_content, tool_calls, tool_call_id, name: the order of `Message`."""

Extras = tuple[str | None, str | None, str | None, str | None]
"""The last four fields of a turn."""

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Known names of the four roles (OpenAI, ShareGPT, OASST, Gemma). Any other name is rejected, never guessed."""

ANSWER_COLUMNS = ("response", "completion", "answer", "output")
"""Columns that may hold the old answer to a text in `prompt`."""


def conversation(row: Any, *, columnar: bool = False) -> tuple[list[Turn], str | None]:
    """(turns, tools) of one row. `columnar`: it came from a column store, whose nulls may be padding.

    Raises RowError with the reason; no other exception for any JSON value.
    """
    if type(row) is not dict:
        raise RowError(Reason.NOT_AN_OBJECT, f"found {type(row).__name__}")
    tools = row.get("tools")
    if tools is not None:
        tools = canonical_tools(tools, drop_nulls=columnar)
    for column in ("messages", "conversations", "conversation"):
        value = row.get(column)
        if value is not None:
            return _turns(_listed(value, column), columnar), tools
    if row.get("turns") is not None:
        return _spec_bench(_listed(row["turns"], "turns"), columnar), tools
    if row.get("prompt") is not None:
        return _prompt(row, columnar), tools
    shown = ", ".join(sorted(map(str, row))[:8]) or "no column"
    raise RowError(Reason.NO_CONVERSATION, f"found {shown}")


def _listed(value: Any, column: str) -> list[Any]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise RowError(Reason.BAD_MESSAGE, f"{column} is text that is not JSON: {error}") from error
    if not isinstance(value, list):
        raise RowError(Reason.BAD_MESSAGE, f"{column} is {type(value).__name__}, expected a list")
    if not value:
        raise RowError(Reason.NO_MESSAGES, f"{column} is empty")
    return value


def _turns(values: list[Any], columnar: bool) -> list[Turn]:
    turns: list[Turn] = []
    for value in values:
        if type(value) is not dict:
            raise RowError(Reason.BAD_MESSAGE, f"message {len(turns)} is {type(value).__name__}, expected an object")
        turns.append(_turn(value, columnar))
    return turns


def _turn(message: dict[str, Any], columnar: bool) -> Turn:
    name = message.get("role")
    if name is None:
        name = message.get("from")
    role = ROLES.get(name) if type(name) is str else None
    if role is None:
        role = ROLES.get(name.strip().lower()) if type(name) is str else None
        if role is None:
            raise RowError(Reason.UNKNOWN_ROLE, f"role {name!r:.60}")
    content = message.get("content")
    if content is None:
        content = message.get("value")
    if type(content) is str:
        if len(message) == 2:
            return (role, content, None, None, None, None)
    else:
        content = content_text(content)
    return (role, content, *_extras(message, role, columnar))


def _extras(message: dict[str, Any], role: str, columnar: bool) -> Extras:
    reasoning = calls = None
    if role == "assistant":
        for field in ("reasoning_content", "reasoning", "thinking"):
            reasoning = message.get(field)
            if reasoning is not None:
                break
        if reasoning is not None and type(reasoning) is not str:
            raise RowError(Reason.BAD_CONTENT_TYPE, f"reasoning is {type(reasoning).__name__}, expected text")
        calls = canonical_calls(message.get("tool_calls"), drop_nulls=columnar)
    return reasoning or None, calls, _text_or_none(message.get("tool_call_id")), _text_or_none(message.get("name"))


def _text_or_none(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def content_text(content: Any) -> str:
    """The text of `content`: a string, null (empty), or a list of text parts, joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise RowError(Reason.BAD_CONTENT_TYPE, f"content is {type(content).__name__}, expected text")
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type", "a part without text") if isinstance(part, dict) else type(part).__name__
    raise RowError(Reason.UNSUPPORTED_CONTENT_PART, f"content part {kind!r:.60}; this is a text-only run")


def _spec_bench(turns: list[Any], columnar: bool) -> list[Turn]:
    """User turns with an empty assistant placeholder between them; the regeneration answers each."""
    if isinstance(turns[0], dict):
        return _turns(turns, columnar)
    placed: list[Turn] = []
    for turn in turns:
        if not isinstance(turn, str):
            raise RowError(Reason.BAD_CONTENT_TYPE, f"a turn is {type(turn).__name__}, expected text")
        if placed:
            placed.append(("assistant", "", None, None, None, None))
        placed.append(("user", turn, None, None, None, None))
    return placed


def _prompt(row: dict[str, Any], columnar: bool) -> list[Turn]:
    prompt = row["prompt"]
    if isinstance(prompt, list):
        turns = _turns(_listed(prompt, "prompt"), columnar)
    elif isinstance(prompt, str):
        turns = [("user", prompt, None, None, None, None)]
    else:
        raise RowError(Reason.BAD_MESSAGE, f"prompt is {type(prompt).__name__}, expected text or a list")
    system = row.get("system")
    if isinstance(system, str) and system and turns[0][0] != "system":
        turns.insert(0, ("system", system, None, None, None, None))
    for column in ANSWER_COLUMNS:
        answer = row.get(column)
        if isinstance(answer, list) and answer and isinstance(answer[0], dict):
            return turns + _turns(answer, columnar)
        if isinstance(answer, str):
            return [*turns, ("assistant", answer, None, None, None, None)]
    return turns
