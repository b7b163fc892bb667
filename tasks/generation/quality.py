"""Is this what the target was asked for? Normalises an answer and gives its reason code if not. Pure."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tasks.client.chat import ChatOutcome, OutcomeKind
from tasks.generation.reasons import Reason
from tasks.generation.repetition import as_array, repeats, single_token_run

_SPACE = re.compile(r"[\s\ufffd]+")


class Target(Protocol):
    """What judging needs of tasks.target.text.TargetText."""

    @property
    def family(self) -> Any:
        """think_open, think_close, tool_call_open, end_of_turn."""

    @property
    def control_tokens(self) -> frozenset[str]:
        """Tokens that are structure, never text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text with control tokens kept."""

    def parse_answer(self, ids: Sequence[int], *, thinking: bool = True) -> Any:
        """reasoning_content, content, tool_calls, think_closed, ends_with_eot."""


@dataclass(frozen=True, slots=True)
class Judged:
    """`outcome` normalised; `reason` None means accepted. `notes` are changes that were made."""

    outcome: ChatOutcome
    reason: Reason | None = None
    detail: str = ""
    notes: tuple[str, ...] = ()


class Judge:
    """Compiled once a run from the target's markers. `drop_repetition` rejects answers that loop."""

    def __init__(self, target: Target, *, drop_repetition: bool = True) -> None:
        family = target.family
        self._open, self._close = family.think_open, family.think_close
        self._tool_open = getattr(family, "tool_call_open", "")
        self._stops = tuple(getattr(family, "end_of_turn", ()))
        tokens = sorted(target.control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._decode: Callable[[Sequence[int]], str] = target.decode
        self._parse = target.parse_answer
        self._drop_repetition = drop_repetition

    def judge(self, outcome: ChatOutcome, *, thinking: bool) -> Judged:
        """Only for outcomes OK and CUT. Thinking asked for must be proven; thinking not asked for must be absent."""
        notes: list[str] = []
        if not outcome.parsed and outcome.token_ids is not None:
            outcome = self._read_ids(outcome, thinking)
        outcome, duplicate = self._split_thinking(outcome, notes)
        outcome = self._drop_trailing_stop(outcome, notes)
        reason, detail = (Reason.DUPLICATE_THINK_BLOCK, "") if duplicate else self._find(outcome, thinking)
        return Judged(outcome, reason, detail, tuple(notes))

    def _read_ids(self, outcome: ChatOutcome, thinking: bool) -> ChatOutcome:
        assert outcome.token_ids is not None
        answer = self._parse(outcome.token_ids, thinking=thinking)
        finish = "tool_calls" if answer.tool_calls and outcome.finish_reason == "stop" else outcome.finish_reason
        return replace(
            outcome,
            content=answer.content,
            reasoning_content=answer.reasoning_content,
            tool_calls=answer.tool_calls,
            finish_reason=finish,
        )

    def _split_thinking(self, outcome: ChatOutcome, notes: list[str]) -> tuple[ChatOutcome, bool]:
        """Reasoning left in the content (the server's parser is off) is split once at the closing marker."""
        content, reasoning = outcome.content, outcome.reasoning_content
        if self._close and self._close in content:
            before, _, after = content.partition(self._close)
            if (reasoning and reasoning.strip()) or self._close in after:
                return outcome, True
            reasoning, content = before, after
            notes.append("reasoning_split_from_content")
        if reasoning is not None and self._open:
            reasoning = reasoning.strip("\n").removeprefix(self._open).strip("\n")
        if reasoning is not None:
            content = content.lstrip("\n")  # the separator after the think block, kept by SGLang 0.5.17
        return replace(outcome, content=content, reasoning_content=reasoning), False

    def _drop_trailing_stop(self, outcome: ChatOutcome, notes: list[str]) -> ChatOutcome:
        text = outcome.content.rstrip()
        for stop in self._stops:
            if stop and text.endswith(stop):
                notes.append("trailing_stop_removed")
                return replace(outcome, content=text.removesuffix(stop))
        return outcome

    def _find(self, outcome: ChatOutcome, thinking: bool) -> tuple[Reason | None, str]:
        for check in (self._numbers, self._runs, self._loops, self._cut, self._thinking, self._text, self._calls):
            reason, detail = check(outcome, thinking)
            if reason is not None:
                return reason, detail
        return None, ""

    def _numbers(self, outcome: ChatOutcome, thinking: bool) -> tuple[Reason | None, str]:
        ids, count = outcome.token_ids, outcome.completion_tokens
        # llama.cpp's logprobs leave out the stop token that its usage counts.
        slack = 1 if outcome.ids_source == "logprobs" else 0
        if ids is not None and count is not None and not len(ids) <= count <= len(ids) + slack:
            return Reason.USAGE_MISMATCH, f"{len(ids)} token ids, usage says {count}"
        prompt, told = outcome.prompt_token_ids, outcome.prompt_tokens
        if prompt is not None and told is not None and len(prompt) != told:
            return Reason.USAGE_MISMATCH, f"{len(prompt)} prompt ids, usage says {told}"
        if count is not None and count <= 0 and outcome.content:
            return Reason.USAGE_MISMATCH, f"text of {len(outcome.content)} characters, usage says {count} tokens"
        if ids is not None and not outcome.tool_calls and not self._agree(outcome):
            return Reason.IDS_MISMATCH, "the decoded ids do not hold the answer's text"
        return None, ""

    def _agree(self, outcome: ChatOutcome) -> bool:
        assert outcome.token_ids is not None
        decoded = _SPACE.sub("", self._decode(outcome.token_ids))
        parts = (outcome.content, outcome.reasoning_content or "")
        return all(_SPACE.sub("", part) in decoded for part in parts)

    def _runs(self, outcome: ChatOutcome, thinking: bool) -> tuple[Reason | None, str]:
        text = f"{outcome.reasoning_content or ''} {outcome.content}"
        found = single_token_run(as_array(outcome.token_ids, text), known_ids=outcome.token_ids is not None)
        return (Reason.SINGLE_TOKEN_RUN, found) if found else (None, "")

    def _cut(self, outcome: ChatOutcome, thinking: bool) -> tuple[Reason | None, str]:
        if outcome.kind is not OutcomeKind.CUT:
            return None, ""
        if thinking and not outcome.content.strip() and not outcome.tool_calls:
            return Reason.TRUNCATED_IN_REASONING, f"cut after {outcome.completion_tokens} tokens of thinking"
        return Reason.TRUNCATED_BY_LENGTH, f"cut after {outcome.completion_tokens} tokens"

    def _thinking(self, outcome: ChatOutcome, thinking: bool) -> tuple[Reason | None, str]:
        reasoning = (outcome.reasoning_content or "").strip()
        if not thinking:
            return (Reason.THINKING_MODE_MISMATCH, reasoning[:80]) if reasoning else (None, "")
        if not reasoning and not self._close and not self._open:
            return None, ""  # the target has no think block: the thinking canary says so, and no answer can have one
        if not reasoning:
            return Reason.MISSING_REASONING, f"the answer begins {outcome.content.strip()[:80]!r}"
        if outcome.content.strip() or outcome.tool_calls:
            return None, ""
        if outcome.token_ids is None:
            return Reason.ANSWER_IN_REASONING, f"the reasoning ends {reasoning[-80:]!r}"
        closed = self._close and self._close in self._decode(outcome.token_ids)
        return (None, "") if closed else (Reason.UNCLOSED_THINK, f"the thinking ends {reasoning[-80:]!r}")

    def _text(self, outcome: ChatOutcome, thinking: bool) -> tuple[Reason | None, str]:
        for part in (outcome.content, outcome.reasoning_content or ""):
            if self._tool_open and self._tool_open in part:
                return Reason.TOOL_CALL_AS_TEXT, f"{self._tool_open} in the text"
            found = self._control.search(part) if self._control else None
            if found:
                return Reason.CONTROL_TOKEN_IN_CONTENT, f"{found.group()} in the text"
        return None, ""

    def _calls(self, outcome: ChatOutcome, thinking: bool) -> tuple[Reason | None, str]:
        if not outcome.tool_calls:
            if outcome.finish_reason == "tool_calls":
                return Reason.BAD_TOOL_CALL, "finish_reason tool_calls without calls"
            return (None, "") if outcome.content.strip() else (Reason.EMPTY_ANSWER, "no text and no tool call")
        try:
            for call in json.loads(outcome.tool_calls):
                arguments = call["function"].get("arguments")
                if isinstance(arguments, str) and arguments:
                    json.loads(arguments)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return Reason.BAD_TOOL_CALL, f"{type(error).__name__}: {error}"
        return None, ""

    def _loops(self, outcome: ChatOutcome, thinking: bool) -> tuple[Reason | None, str]:
        if not self._drop_repetition:
            return None, ""
        text = f"{outcome.reasoning_content or ''} {outcome.content}"
        found = repeats(as_array(outcome.token_ids, text))
        return (Reason.DEGENERATE_REPETITION, found) if found else (None, "")
