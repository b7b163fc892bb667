"""Makes completions.parquet as generation writes it, for tests of what comes after."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.records import Message
from tasks.target.text import TargetText

_TEXT = pa.string()
MESSAGE = pa.struct([(n, _TEXT) for n in Message("user").as_dict()])
TURN = pa.struct(
    [
        ("turn", pa.int32()),
        ("prompt_token_ids", pa.large_list(pa.int32())),
        ("token_ids", pa.large_list(pa.int32())),
        ("content", _TEXT),
        ("reasoning_content", _TEXT),
        ("tool_calls", _TEXT),
        ("finish_reason", _TEXT),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("ids_source", _TEXT),
        ("accept_length", pa.float32()),
        ("latency_s", pa.float32()),
        ("attempt", pa.int32()),
        ("server", _TEXT),
        ("seed", pa.int64()),
    ]
)
COMPLETIONS = pa.schema(
    [
        ("prompt_id", _TEXT),
        ("sample_index", pa.int32()),
        ("source", _TEXT),
        ("row", pa.int64()),
        ("messages", pa.list_(MESSAGE)),
        ("tools", _TEXT),
        ("turns", pa.list_(TURN)),
        ("thinking", pa.bool_()),
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("top_k", pa.int32()),
        ("output_tokens", pa.int64()),
    ]
)


def turn_of(
    order: int,
    answer: Message,
    prompt_ids: Sequence[int] | None = None,
    token_ids: Sequence[int] | None = None,
    finish_reason: str | None = None,
    completion_tokens: int | None = None,
) -> dict[str, Any]:
    """One regenerated turn; without ids it is what a server without token ids gives."""
    return {
        "turn": order,
        "prompt_token_ids": None if prompt_ids is None else list(prompt_ids),
        "token_ids": None if token_ids is None else list(token_ids),
        "content": answer.content,
        "reasoning_content": answer.reasoning_content,
        "tool_calls": answer.tool_calls,
        "finish_reason": finish_reason or ("tool_calls" if answer.tool_calls else "stop"),
        "prompt_tokens": None if prompt_ids is None else len(prompt_ids),
        "completion_tokens": completion_tokens if token_ids is None else len(token_ids),
        "ids_source": "server" if token_ids is not None else "none",
        "attempt": 1,
        "server": "s0",
        "seed": 1,
    }


def completion(
    prompt_id: str,
    messages: Sequence[Message],
    turns: Sequence[dict[str, Any]] | None = None,
    *,
    thinking: bool = True,
    tools: str | None = None,
) -> dict[str, Any]:
    """One conversation; by default every assistant message is a turn known as text only."""
    if turns is None:
        answers = [m for m in messages if m.role == "assistant"]
        turns = [turn_of(order, answer) for order, answer in enumerate(answers)]
    return {
        "prompt_id": prompt_id,
        "sample_index": 0,
        "source": "test.jsonl",
        "row": 0,
        "messages": [m.as_dict() for m in messages],
        "tools": tools,
        "turns": list(turns),
        "thinking": thinking,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
        "output_tokens": 0,
    }


def served(
    target: TargetText,
    prompt_id: str,
    messages: Sequence[Message],
    sampled: Sequence[str],
    *,
    thinking: bool = True,
    preserve_thinking: bool = False,
    tools: str | None = None,
) -> dict[str, Any]:
    """A conversation with the ids that a server would report: `sampled` are the answers' raw sampled texts."""
    turns, at = [], [i for i, m in enumerate(messages) if m.role == "assistant"]
    for order, (index, text) in enumerate(zip(at, sampled, strict=True)):
        history = list(messages[:index])
        prompt = target.prompt_ids(history, tools=tools, thinking=thinking, preserve_thinking=preserve_thinking)
        turns.append(turn_of(order, messages[index], prompt, target.encode(text)))
    return completion(prompt_id, messages, turns, thinking=thinking, tools=tools)


def without_ids(row: dict[str, Any]) -> dict[str, Any]:
    """The same conversation from a server that reports no ids."""
    gone = {"prompt_token_ids": None, "token_ids": None, "ids_source": "none"}
    return {**row, "turns": [{**turn, **gone} for turn in row["turns"]]}


def write_completions(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A completions.parquet with the explicit schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=COMPLETIONS), path)
    return path


def batch(rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """The same in memory, as tokenization reads it."""
    return pa.RecordBatch.from_pylist(list(rows), schema=COMPLETIONS)


def assistant(content: str = "", reasoning: str | None = None, calls: str | None = None) -> Message:
    """Short for an assistant message."""
    return replace(Message("assistant", content, reasoning), tool_calls=calls)
