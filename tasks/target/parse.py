"""Tokens back to turns: what one answer says, and which messages a tokenized row holds.

Works on guarded text (tasks/target/guard.py), where structure and look-alike text are told apart.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tasks.records import Message, Role
from tasks.target.family import Family
from tasks.target.guard import guard, unguard
from tasks.target.toolcalls import read_calls


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer. `reasoning_content` is None without a think block and "" for an empty one."""

    reasoning_content: str | None
    content: str
    tool_calls: str | None
    think_closed: bool
    ends_with_eot: bool


class TurnReader:
    """Reads guarded text by one family's headers and markers."""

    def __init__(self, family: Family, control: re.Pattern[str], extra_stops: Iterable[str] = ()) -> None:
        self._family = family
        self._control = control
        stops = {*family.end_of_turn, *family.implicit_stops, *extra_stops} - {""}
        self._stop = re.compile(self._any(sorted(stops, key=len, reverse=True)) + r"\s*\Z")
        self._stops = [self._guard(stop) for stop in stops]
        self._roles = {self._guard(header): role for header, role in family.headers}
        self._header = re.compile(self._any(header for header, _ in family.headers))
        self._one_turn = any(o.startswith(family.assistant_header) for o in family.answer_opens)

    def _guard(self, text: str) -> str:
        return guard(text, self._control)

    def _any(self, texts: Iterable[str]) -> str:
        return "(?:" + ("|".join(re.escape(self._guard(t)) for t in texts) or r"(?!)") + ")"

    def answer(self, text: str, thinking_open: bool) -> Answer:
        """Read sampled text; `thinking_open` says that the prompt had already opened the think block."""
        stop = self._stop.search(text)
        body = text[: stop.start()] if stop else text
        reasoning, rest, closed = self._think(body, thinking_open)
        for opening in self._family.answer_opens:
            rest = rest.removeprefix(self._guard(opening))
        if closed:
            rest = rest.lstrip("\n")
        plain = unguard(rest)
        family = self._family
        content, calls = read_calls(plain, family.tool_format, family.tool_call_open, family.tool_call_close)
        return Answer(None if reasoning is None else unguard(reasoning), content, calls, closed, stop is not None)

    def _think(self, text: str, thinking_open: bool) -> tuple[str | None, str, bool]:
        """(reasoning, rest, closed)."""
        opening, closing = self._guard(self._family.think_open), self._guard(self._family.think_close)
        if not opening:
            return None, text, False
        opened = text.lstrip().startswith(opening)
        inside = text.lstrip().removeprefix(opening) if opened else text
        if closing in inside and (opened or thinking_open or opening not in inside.split(closing)[0]):
            reasoning, _, rest = inside.partition(closing)
            if opened or thinking_open or closing not in self._stops:
                return reasoning.strip("\n"), rest, True
        return (inside.strip("\n"), "", False) if opened or thinking_open else (None, text, False)

    def messages(self, text: str) -> list[Message]:
        """Split guarded text of a whole row at the turn headers. Raises ValueError naming what does not fit."""
        found = list(self._header.finditer(text))
        if not found:
            raise ValueError(f"no turn header of the {self._family.name} template; it starts {unguard(text)[:60]!r}")
        messages = self._leading(text[: found[0].start()])
        index = 0
        while index < len(found):
            role = self._role(found[index].group())
            last = index
            while self._one_turn and role == "assistant" and self._continues(found, last):
                last += 1
            end = found[last + 1].start() if last + 1 < len(found) else len(text)
            body = text[found[index].end() : end]
            if not (body == "" and end == len(text) and role != "assistant"):
                messages += self._turn(role, body, found[index].group())
            index = last + 1
        return messages

    def _continues(self, found: list[re.Match[str]], at: int) -> bool:
        return at + 1 < len(found) and self._role(found[at + 1].group()) == "assistant"

    def _role(self, header: str) -> Role:
        return self._roles[header]

    def _leading(self, text: str) -> list[Message]:
        for prefix in self._family.prefix:
            text = text.removeprefix(self._guard(prefix))
        if text.strip() and not self._family.system_is_bare:
            raise ValueError(f"text before the first turn header: {unguard(text)[:60]!r}")
        return [Message("system", unguard(text))] if text.strip() else []

    def _turn(self, role: Role, text: str, header: str) -> list[Message]:
        if role == "assistant":
            answer = self.answer(text, thinking_open=False)
            self._check(answer.content)
            return [Message("assistant", answer.content, answer.reasoning_content, answer.tool_calls)]
        stop = self._stop.search(text)
        body = text[: stop.start()] if stop else text
        if any(inner in body for inner in self._stops):
            raise ValueError(f"an end-of-turn token inside a {role} turn: {unguard(body)[:60]!r}")
        return self._tools(body, header) or [Message(role, unguard(body if stop else body.rstrip("\n")))]

    def _check(self, content: str) -> None:
        for stop in (*self._family.end_of_turn,):
            if stop in content and self._control.fullmatch(stop):
                raise ValueError(f"{stop!r} inside an assistant turn: {content[:60]!r}")

    def _tools(self, body: str, header: str) -> list[Message]:
        """Tool results: between response tags, or a harmony message addressed to the assistant."""
        opening, closing = (self._guard(t) for t in (self._family.tool_response_open, self._family.tool_response_close))
        if opening and body.lstrip().startswith(opening):
            texts = re.findall(f"{re.escape(opening)}\n?(.*?)\n?{re.escape(closing)}", body, re.DOTALL)
            return [Message("tool", unguard(text)) for text in texts]
        message = self._guard("<|message|>")
        if self._role(header) == "tool" and " to=assistant" in body and message in body:
            name, _, rest = body.partition(" to=assistant")
            text = unguard(rest.partition(message)[2])
            return [Message("tool", _unquoted(text), name=unguard(name))]
        return []


def _unquoted(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text
