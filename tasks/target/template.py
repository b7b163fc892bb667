"""A chat template as transformers renders it, without tokenizer, models or torch."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template

from tasks.errors import TargetError
from tasks.records import Message


def template_kwargs(thinking: bool, preserve_thinking: bool) -> dict[str, Any]:
    """What a request's `chat_template_kwargs` hold, so that the server renders what we render.

    Both are always said: templates differ in their defaults (Qwen3.8 keeps earlier thinking unless told otherwise).
    """
    return {"enable_thinking": thinking, "preserve_thinking": preserve_thinking}


def named(error: Exception) -> str:
    """The template's own words; with the kind of error where those are Python's."""
    kind = type(error).__name__
    return str(error) or kind if isinstance(error, jinja2.TemplateError) else f"{kind}: {error}"


class ChatTemplate:
    """Compiled once; `special` are the tokenizer's named tokens (bos_token…), which templates print.

    `origin` says in errors where the text is from.
    """

    def __init__(self, text: str, special: Mapping[str, str], reasoning_field: str, origin: str) -> None:
        try:
            # The environment is transformers' own (sandbox, tojson, loop controls, generation tags); its public entry
            # point cannot be given a clock, and a template that prints the date must read a frozen one.
            self._compiled: jinja2.Template = _compile_jinja_template(text)
        except Exception as error:  # jinja2's own, and Python's for nesting that it cannot compile
            raise TargetError(
                f"the chat template {origin} does not compile: {named(error)}; "
                "give a working one as target.chat_template"
            ) from error
        self._special = dict(special)
        self._reasoning_field = reasoning_field
        self._loaded = datetime.now(UTC)
        self.reads_clock = "strftime_now" in text
        self.arguments_as_text = False
        self._settle_arguments()

    def render(
        self,
        messages: Sequence[Message],
        tools: str | None,
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
        now: datetime | None = None,
    ) -> str:
        """The text. Raises ValueError with the template's own message when it refuses the messages."""
        entries = [self._entry(message) for message in messages]
        listed = json.loads(tools) if tools else None
        try:
            text: str = self._compiled.render(
                messages=entries,
                tools=listed,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=(now or self._loaded).strftime,
                **self._special,
                **kwargs,
            )
        except Exception as error:  # a template is a program of somebody else's: it may divide by zero or never end
            raise ValueError(f"the chat template refused the messages: {named(error)}") from error
        return text

    def _settle_arguments(self) -> None:
        """Find out whether the template wants tool-call arguments as an object (the usual) or as JSON text."""
        calls = '[{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]'
        probe = [Message("user", "x"), Message("assistant", "", None, calls), Message("tool", "y", tool_call_id="c")]
        for self.arguments_as_text in (False, True):
            try:
                self.render(probe, None, template_kwargs(True, False), True)
            except ValueError:
                continue
            return
        self.arguments_as_text = False

    def _entry(self, message: Message) -> dict[str, Any]:
        """Only the fields that are set: many templates test for a key's presence."""
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning_content is not None:
            entry["reasoning_content"] = message.reasoning_content
            entry[self._reasoning_field] = message.reasoning_content
        if message.tool_calls:
            entry["tool_calls"] = self._calls(message.tool_calls)
        if message.tool_call_id:
            entry["tool_call_id"] = message.tool_call_id
        if message.name:
            entry["name"] = message.name
        return entry

    def _calls(self, text: str) -> list[Any]:
        calls = json.loads(text)
        if not isinstance(calls, list):
            raise ValueError(f"tool_calls is {type(calls).__name__}, expected a JSON list")
        for call in calls:
            function = call.get("function", call) if isinstance(call, dict) else {}
            arguments = function.get("arguments")
            if self.arguments_as_text and not isinstance(arguments, str):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            elif not self.arguments_as_text and isinstance(arguments, str):
                function["arguments"] = json.loads(arguments) if arguments.strip() else {}
        return calls
