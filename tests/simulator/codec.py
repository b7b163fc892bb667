"""Text ↔ token ids of the simulator: a toy vocabulary, or a real TargetText."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

SPECIALS = ("!", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "\n", "\n\n", "<tool_call>", "</tool_call>")
IM_START, IM_END, THINK, CLOSE, NEWLINE, BLANK = 1, 2, 3, 4, 5, 6
_SYLLABLES = ("ka", "lo", "mi", "ren", "su", "ta", "vel", "no", "pri", "shen", "du", "gar")
WORDS = tuple(a + b + c for a in _SYLLABLES for b in _SYLLABLES for c in _SYLLABLES[:7])
FIRST_WORD = 100
_PIECES = re.compile(r"<\|\w+\|>|</?think>|</?tool_call>|\n\n|\n|[^\s<]+|<")
SPACE, FIRST_CHARACTER = 9, 3000
_IDS = {text: index for index, text in enumerate(SPECIALS)} | {w: FIRST_WORD + i for i, w in enumerate(WORDS)}
_TEXTS = {index: text for text, index in _IDS.items()}


class Codec(Protocol):
    """What a simulated server needs of a tokenizer."""

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: Any, thinking: bool) -> list[int]: ...
    def answer_ids(self, reasoning: str | None, content: str, calls: Any, thinking: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class ToyCodec:
    """One id a known word; other words are spelled, a character an id. The same in every process."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _PIECES.findall(text):
            known = _IDS.get(piece)
            ids += [known] if known is not None else [SPACE, *(FIRST_CHARACTER + ord(c) for c in piece)]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        glue = ""
        for index in ids:
            if index >= FIRST_CHARACTER:
                parts.append(chr(index - FIRST_CHARACTER))
                glue = " "
            elif index == SPACE:
                parts.append(glue)
            else:
                bare = index < FIRST_WORD and index != 0
                parts.append(_TEXTS.get(index, "?") if bare else glue + _TEXTS.get(index, "?"))
                glue = "" if bare else " "
        return "".join(parts)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: Any, thinking: bool) -> list[int]:
        ids: list[int] = self.encode(json.dumps(tools)) if tools else []
        for message in messages:
            text = (message.get("reasoning_content") or "") + " " + (message.get("content") or "")
            calls = message.get("tool_calls")
            extra = json.dumps(calls) if calls else ""
            ids += [IM_START, *self.encode(f"{message['role']}\n{text} {extra}"), IM_END, NEWLINE]
        opening = [THINK, NEWLINE] if thinking else [THINK, BLANK, CLOSE, BLANK]
        return [*ids, IM_START, *self.encode("assistant\n"), *opening]

    def answer_ids(self, reasoning: str | None, content: str, calls: Any, thinking: bool) -> list[int]:
        ids = [*self.encode(reasoning or ""), NEWLINE, CLOSE, BLANK] if thinking else []
        for call in calls or ():
            content += f"\n<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
        return [*ids, *self.encode(content.lstrip("\n")), IM_END]


class TargetCodec:
    """A real tokenizer and template, so that a whole run's ids and masks fit together."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: Any, thinking: bool) -> list[int]:
        from tasks.records import Message

        plain = []
        for message in messages:
            calls = message.get("tool_calls")
            plain.append(
                Message(
                    message["role"],
                    message.get("content") or "",
                    message.get("reasoning_content"),
                    json.dumps(calls) if calls else None,
                    message.get("tool_call_id"),
                    message.get("name"),
                )
            )
        text = json.dumps(tools) if tools else None
        return list(self.target.prompt_ids(plain, tools=text, thinking=thinking, preserve_thinking=False))

    def answer_ids(self, reasoning: str | None, content: str, calls: Any, thinking: bool) -> list[int]:
        family = self.target.family
        text = content.lstrip("\n")
        if thinking and family.think_close:
            text = f"{reasoning or ''}\n{family.think_close}\n\n{text}"
        end = self.target.eos_ids[0]
        return [*self.target.encode(text), end]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.target.decode(list(ids)))


@dataclass(frozen=True, slots=True)
class ToyAnswer:
    """As TargetText.parse_answer returns it."""

    reasoning_content: str | None
    content: str
    tool_calls: str | None
    think_closed: bool
    ends_with_eot: bool


class SimTarget:
    """Stands in for tasks.target.TargetText in tests that need no real tokenizer."""

    family = SimpleNamespace(
        name="toy",
        think_open="<think>",
        think_close="</think>",
        tool_call_open="<tool_call>",
        tool_call_close="</tool_call>",
        reasoning_field="reasoning_content",
        end_of_turn=("<|im_end|>",),
        answer_opens=(),
    )
    generation_config: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
    config: dict[str, Any] = {}
    eos_ids = (IM_END,)
    vocab_size = 100_000
    template_sha256 = "simulator-template"
    tokenizer_sha256 = "simulator-tokenizer"
    control_tokens = frozenset({"<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"})

    def __init__(self) -> None:
        self._codec = ToyCodec()

    def encode(self, text: str) -> list[int]:
        return self._codec.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids)

    def prompt_ids(
        self, messages: Sequence[Any], *, tools: str | None, thinking: bool, preserve_thinking: bool
    ) -> list[int]:
        plain = [m if isinstance(m, Mapping) else m.as_dict() for m in messages]
        return self._codec.prompt_ids(plain, json.loads(tools) if tools else None, thinking)

    def find_control_tokens(self, text: str) -> list[str]:
        return [token for token in sorted(self.control_tokens) if token in text]

    def parse_answer(self, ids: Sequence[int], *, thinking: bool = True) -> ToyAnswer:
        ids = list(ids)
        ends = bool(ids) and ids[-1] == IM_END
        ids = ids[:-1] if ends else ids
        if not thinking:
            return ToyAnswer(None, self.decode(ids), None, True, ends)
        closed = CLOSE in ids
        at = ids.index(CLOSE) if closed else len(ids)
        reasoning = self.decode(ids[:at]).strip("\n")
        return ToyAnswer(reasoning, self.decode(ids[at + 1 :]).lstrip("\n"), None, closed, ends)
