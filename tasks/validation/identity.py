"""Ids are digests of canonical content: resuming, adding prompts and removing duplicates are the same operation."""

import hashlib
from collections.abc import Sequence

import orjson

from tasks.records import Message
from tasks.validation.canonical import Turn

ID_CHARACTERS = 32
"""Hex characters kept of the sha256: 128 bits, no collision among 10^12 prompts to be expected."""


def prompt_turns(turns: Sequence[Turn]) -> list[Turn]:
    """The prompt inside a conversation: trailing assistant turns dropped, assistant text removed, tool calls kept."""
    end = len(turns)
    while end and turns[end - 1][0] == "assistant":
        end -= 1
    return [t if t[0] != "assistant" else ("assistant", "", None, t[3], None, None) for t in turns[:end]]


def digests(turns: Sequence[Turn], tools: str | None, samples: int) -> list[str]:
    """One id a sample: the first 32 hex characters of sha256 of `[turns, tools, sample index]` as compact JSON."""
    prefix = orjson.dumps([turns, tools])[:-1]
    if samples == 1:
        return [hashlib.sha256(prefix + b",0]").hexdigest()[:ID_CHARACTERS]]
    base = hashlib.sha256(prefix)
    ids = []
    for sample in range(samples):
        digest = base.copy()
        digest.update(b",%d]" % sample)
        ids.append(digest.hexdigest()[:ID_CHARACTERS])
    return ids


def prompt_id(messages: Sequence[Message], tools: str | None = None, sample_index: int = 0) -> str:
    """The id of a conversation's prompt, for whoever holds `Message` values."""
    turns: list[Turn] = [
        (m.role, m.content, m.reasoning_content, m.tool_calls, m.tool_call_id, m.name) for m in messages
    ]
    return digests(prompt_turns(turns), tools, sample_index + 1)[sample_index]
