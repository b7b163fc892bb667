"""Multi-turn regeneration: every assistant turn is asked for on the regenerated history. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tasks.generation.reasons import Reason
from tasks.records import Message

TurnPolicy = Literal["every", "last"]


@dataclass(frozen=True, slots=True)
class Step:
    """Ask for an answer to `history`, or end: `done`, with `cut` naming why turns were left out."""

    history: tuple[Message, ...]
    done: bool = False
    cut: Reason | None = None


def next_step(messages: Sequence[Message], answers: Sequence[Message], policy: TurnPolicy = "every") -> Step:
    """Where the conversation stands after `answers`, one for each assistant turn regenerated so far.

    `messages` are the prompt's: assistant turns inside are placeholders with their recorded calls. Under `last` an
    assistant turn that still has text is used as history and only placeholders and the end are asked for. Recorded
    tool results follow while the regenerated calls match the recorded ones; their ids are those of the new calls.
    """
    history: list[Message] = []
    given = 0
    ids: dict[str, str] = {}
    for message in messages:
        if message.role != "assistant":
            history.append(_with_new_id(message, ids))
            continue
        if policy == "last" and (message.content or message.reasoning_content):
            history.append(message)
            continue
        if given == len(answers):
            return Step(tuple(history))
        answer = answers[given]
        given += 1
        history.append(answer)
        cut = _compare(message, answer, ids)
        if cut is not None:
            return Step(tuple(history), done=True, cut=cut)
    if given == len(answers):
        return Step(tuple(history))
    return Step((*history, answers[given]), done=True)


def _with_new_id(message: Message, ids: dict[str, str]) -> Message:
    if message.role == "tool" and message.tool_call_id in ids:
        return replace(message, tool_call_id=ids[str(message.tool_call_id)])
    return message


def _compare(recorded: Message, answer: Message, ids: dict[str, str]) -> Reason | None:
    """None when the conversation may go on; fills `ids` (recorded call id → new call id)."""
    before, now = parse_calls(recorded.tool_calls), parse_calls(answer.tool_calls)
    if not before:
        return Reason.UNEXPECTED_TOOL_CALL if now else None
    if [_call_key(call) for call in before] != [_call_key(call) for call in now]:
        return Reason.TOOL_CALLS_DIFFER
    pairs = zip(before, now, strict=True)
    ids.update({str(old["id"]): str(new["id"]) for old, new in pairs if old.get("id") and new.get("id")})
    return None


def parse_calls(text: str | None) -> list[dict[str, Any]]:
    """OpenAI's list of calls from JSON text. Raises ValueError when it is something else."""
    value = json.loads(text) if text else []
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise ValueError("tool_calls is not a JSON list of objects")
    return value


def _call_key(call: dict[str, Any]) -> tuple[str, str]:
    """Name and canonical arguments: object or JSON text, whatever the order of keys."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return str(function.get("name")), arguments
    return str(function.get("name")), json.dumps(arguments or {}, sort_keys=True, separators=(",", ":"))


def to_server(message: Message, reasoning_field: str = "reasoning_content") -> dict[str, Any]:
    """A message as the server gets it; unset fields are left out, reasoning goes where the template reads it."""
    value: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content is not None:
        value["reasoning_content"] = message.reasoning_content
        value[reasoning_field] = message.reasoning_content
    calls = parse_calls(message.tool_calls)
    if calls:
        value["tool_calls"] = [_as_openai(call) for call in calls]
    if message.tool_call_id is not None:
        value["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        value["name"] = message.name
    return value


def _as_openai(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments as JSON text, which is what OpenAI-compatible servers read."""
    function = dict(call.get("function", call))
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "type": call.get("type", "function"), "function": function}
