"""Rows for the tests of validation, and a small target for masks."""

from pathlib import Path
from typing import Any

import numpy as np

from tasks.target.counts import CountTables, count_many
from tasks.target.family import Family


def chat(question: str, answer: str | None = None, **more: Any) -> dict[str, Any]:
    """A row in OpenAI's form."""
    messages = [{"role": "user", "content": question}]
    return {"messages": messages + ([{"role": "assistant", "content": answer}] if answer is not None else []), **more}


class SmallTarget:
    """A target whose tokens are numbers: 1 and 2 are think marks, 3 ends a turn, 4 is white space, 5 begins a turn."""

    vocab_size = 100
    control_tokens = frozenset({"<|end|>", "<think>", "</think>"})
    family = Family("small", think_open="<think>", think_close="</think>")
    directory = Path("small")

    def __init__(self) -> None:
        kinds = np.zeros(self.vocab_size, np.uint8)
        kinds[[1, 2, 3]] = 1
        kinds[4] = 2
        self.tables = CountTables(kinds, ())

    def count_many(self, values: Any, offsets: Any, mask: Any) -> Any:
        return count_many(self.tables, values, offsets, mask)

    def encode(self, text: str) -> list[int]:
        return [10 + len(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def split_conversation(self, ids: list[int]) -> list[Any]:
        from tasks.records import Message

        if not ids or ids[0] != 5:
            raise ValueError("no turn header at the start")
        turns = " ".join(map(str, ids[1:])).split(" 5 ")
        roles = ("user", "assistant")
        return [Message(roles[i % 2], text) for i, text in enumerate(turns)]
