"""Reads completions: every assistant turn becomes an Item, with its ids still in Arrow's buffers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.records import Message
from tasks.tokenization.answers import Context
from tasks.tokenization.reasons import Reason

Ids = NDArray[np.int32]
Reject = Callable[[str, int, Reason, str], None]
"""Called with prompt id, turn, reason and detail."""


@dataclass(slots=True)
class Item:
    """One assistant turn on its way to a row: `ids[start:end]` is what the target sampled."""

    prompt_id: str
    turn: int
    finish_reason: str
    context: Context
    answer: Message
    prompt_ids: Ids
    token_ids: Ids
    prompt_tokens: int | None
    completion_tokens: int | None
    ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    start: int = 0
    end: int = 0
    exact: bool = False
    method: str = "server_ids"
    truncated: bool = False


def read_items(batch: pa.RecordBatch, preserve_thinking: bool, now: datetime | None, reject: Reject) -> Iterator[Item]:
    """Every assistant turn of a batch of completions. Ids stay in Arrow's buffers until they are used."""
    turns = batch.column("turns")
    flat = turns.flatten()
    bounds = np.concatenate(([0], np.cumsum(turns.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))))
    prompt_ids, token_ids = (_slices(flat.field(name)) for name in ("prompt_token_ids", "token_ids"))
    names = (
        "turn",
        "content",
        "reasoning_content",
        "tool_calls",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
    )
    plain = {name: flat.field(name).to_pylist() for name in names}
    thinking = batch.column("thinking").to_pylist()
    tools = batch.column("tools").to_pylist()
    messages = batch.column("messages").to_pylist()
    for row, prompt_id in enumerate(batch.column("prompt_id").to_pylist()):
        conversation = [Message(**message) for message in messages[row] or ()]
        entries = range(int(bounds[row]), int(bounds[row + 1]))
        positions = answer_positions(conversation, [plain["content"][entry] for entry in entries])
        for entry, at in zip(entries, positions, strict=True):
            turn = int(plain["turn"][entry])
            if at is None:
                reject(prompt_id, turn, Reason.BAD_ROW, f"turn {turn} has no assistant message")
                continue
            values = {name: plain[name][entry] for name in names}
            yield Item(
                prompt_id,
                turn,
                values["finish_reason"] or "",
                Context(conversation[:at], tools[row], bool(thinking[row]), preserve_thinking, now),
                _answer(values),
                prompt_ids(entry),
                token_ids(entry),
                values["prompt_tokens"],
                values["completion_tokens"],
            )


def _answer(values: dict[str, Any]) -> Message:
    return Message("assistant", values["content"] or "", values["reasoning_content"], values["tool_calls"] or None)


def answer_positions(messages: Sequence[Message], contents: Sequence[str | None]) -> list[int | None]:
    """Index of the message that holds each turn's answer.

    Every assistant message, in order, when there are as many as turns. Under the turn policy "last" some assistant
    messages are history that was not asked for: then answers are looked up by their text, from the end.
    """
    assistants = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if len(assistants) == len(contents):
        return list(assistants)
    found: list[int | None] = []
    for content in reversed(contents):
        while assistants and messages[assistants[-1]].content.strip() != (content or "").strip():
            assistants.pop()
        found.append(assistants.pop() if assistants else None)
    return found[::-1]


def _slices(lists: pa.Array) -> Callable[[int], Ids]:
    """A function from row to the row's ids, without copying."""
    values = lists.values.to_numpy(zero_copy_only=False)
    offsets = lists.offsets.to_numpy()
    valid = lists.is_valid().to_numpy(zero_copy_only=False)

    def ids(row: int) -> Ids:
        return np.asarray(values[offsets[row] : offsets[row + 1]] if valid[row] else values[:0])

    return ids
