"""Where only an answer's text exists: the one text that is tokenized, and which characters the target sampled."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from tasks.records import Message
from tasks.target.text import TargetText
from tasks.tokenization.reasons import Reason


class Unusable(Exception):
    """This answer cannot become a row; carries the reason and a detail for a person."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Context:
    """How the server rendered the conversation before the answer."""

    history: Sequence[Message]
    tools: str | None
    thinking: bool
    preserve_thinking: bool
    now: datetime | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """`text[start:]` was sampled. `guarded` tells the spelling of control tokens (see tasks.target.guard)."""

    text: str
    start: int
    guarded: bool
    method: str


def render(target: TargetText, context: Context, guarded: bool, answer: Message | None = None) -> str:
    """The prompt (with the generation prompt), or the conversation with `answer` (without).

    Raises Unusable when the template refuses the messages.
    """
    messages = [*context.history, answer] if answer else context.history
    call = target.render_guarded if guarded else target.render
    try:
        return call(
            messages,
            tools=context.tools,
            thinking=context.thinking,
            preserve_thinking=context.preserve_thinking,
            add_generation_prompt=answer is None,
            now=context.now,
        )
    except ValueError as error:
        raise Unusable(Reason.TEMPLATE_REFUSED, str(error)) from error


def normalise(target: TargetText, answer: Message) -> Message:
    """Move one think block at the start of the content into `reasoning_content`.

    Raises Unusable when think markers remain after that: which of two blocks was sampled cannot be known.
    """
    opening, closing = target.family.think_open, target.family.think_close
    if not closing:
        return answer
    content, reasoning = answer.content, answer.reasoning_content
    if closing in content and not (reasoning or "").strip():
        inside, _, content = content.partition(closing)
        reasoning = inside.strip().removeprefix(opening).strip("\n")
        content = content.lstrip("\n")
    if any(marker in text for marker in (opening, closing) for text in (content, reasoning or "") if text):
        raise Unusable(Reason.DUPLICATE_THINK_BLOCK, f"{opening!r} or {closing!r} remains in the answer's text")
    return replace(answer, content=content, reasoning_content=reasoning)


def sampled_span(target: TargetText, context: Context, answer: Message, finish_reason: str) -> Span:
    """The text of prompt and answer, and where the answer begins. Raises Unusable."""
    answer = normalise(target, answer)
    if not (answer.content or answer.reasoning_content or answer.tool_calls):
        raise Unusable(Reason.EMPTY_ANSWER, "no text, reasoning or tool calls")
    guarded = target.has_control([*context.history, answer], context.tools)
    prompt = render(target, context, guarded)
    cut = finish_reason == "length"
    in_thinking = cut and not answer.content.strip() and not answer.tool_calls
    if not in_thinking:
        whole = render(target, context, guarded, answer)
        if whole.startswith(prompt) and _holds(whole[len(prompt) :], answer):
            text = _until_stop(target, whole, len(prompt), guarded, cut, bool(answer.tool_calls))
            return Span(text, len(prompt), guarded, "template_offsets")
    if answer.tool_calls:
        raise Unusable(Reason.ANSWER_NOT_RENDERED, "the template rewrites what stands before its tool calls")
    text = prompt + _compose(target, prompt, answer, guarded, cut, in_thinking)
    return Span(text, len(prompt), guarded, "composed_offsets")


def _holds(rendered: str, answer: Message) -> bool:
    """Whether the template really wrote the answer: some drop reasoning even in the last turn."""
    return answer.content.strip() in rendered and (answer.reasoning_content or "").strip() in rendered


def _stops(target: TargetText, guarded: bool) -> re.Pattern[str]:
    family = target.family
    texts = {*family.end_of_turn, *family.implicit_stops} - {""}
    spelled = [target.guard(text) if guarded else text for text in texts]
    return re.compile("|".join(re.escape(text) for text in sorted(spelled, key=len, reverse=True)) or r"(?!)")


def _until_stop(target: TargetText, whole: str, start: int, guarded: bool, cut: bool, calls: bool) -> str:
    """Cut what the template writes after the end of turn; add the stop that a template leaves to the next turn.

    A cut answer has no end of turn: the target did not sample one.
    """
    family = target.family
    closing = target.guard(family.think_close) if guarded else family.think_close
    at = whole.find(closing, start) if closing else -1
    after = start if at < 0 else at + len(closing)
    stop = _stops(target, guarded).search(whole, after)
    if stop:
        return whole[: stop.start()].rstrip("\n") if cut else whole[: stop.end()]
    if cut or not family.implicit_stops:
        return whole
    last = family.implicit_stops[-1 if calls else 0]
    return whole + (target.guard(last) if guarded else last)


def _compose(target: TargetText, prompt: str, answer: Message, guarded: bool, cut: bool, in_thinking: bool) -> str:
    """The answer as the family description spells it, for templates that do not write it themselves."""
    family = target.family

    def spell(text: str) -> str:
        return target.guard(text) if guarded else text

    opening = spell(family.think_open)
    opened = bool(opening) and prompt.rstrip("\n").endswith(opening.rstrip("\n"))
    text = ""
    if family.think_close and (answer.reasoning_content or opened):
        text = "" if opened else opening + family.think_after_open
        text += (answer.reasoning_content or "").strip("\n")
        if in_thinking:
            return text
        text += family.think_before_close + spell(family.think_close) + spell(family.think_after_close)
    text += answer.content
    return text if cut or not family.end_of_turn else text + spell(family.end_of_turn[0])
