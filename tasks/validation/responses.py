"""Old responses, judged apart from their prompts: think blocks taken apart, emptiness, the floor of content tokens."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.validation.canonical import Turn
from tasks.validation.reasons import Reason, RowError

SURE_CHARACTERS = 64
"""Characters a token of the floor beyond which text is not counted: no ordinary token is that long."""

WORDS = 4
"""Words a token of the floor beyond which text is not counted either."""

_PIECES = re.compile(r"[A-Za-z0-9]{1,8}|[^\sA-Za-z0-9]")


@dataclass(frozen=True, slots=True)
class Judge:
    """How old responses are judged. `count` gives the tokens of a text; None estimates from words.

    `min_content_tokens` is compared with the sum over a row's assistant turns, markers and end of turn not counted.
    """

    think_open: str = "<think>"
    think_close: str = "</think>"
    min_content_tokens: int = 8
    count: Callable[[str], int] | None = None

    def content_tokens(self, text: str, enough: int) -> int:
        """Tokens of `text`, or at least `enough` as soon as it is sure."""
        text = text.strip()
        if len(text) >= SURE_CHARACTERS * max(enough, 1):
            return max(enough, 1)
        if not text:
            return 0
        # A word is at least one token of any pre-tokenizer that splits at white space, and four words surely are.
        if len(text.split(None, WORDS * enough)) > WORDS * enough:
            return enough
        return self.count(text) if self.count else len(_PIECES.findall(text))


def split_thinking(turn: Turn, judge: Judge) -> Turn:
    """The turn with an inline think block moved to its own field. Raises RowError for two blocks or half of one."""
    role, content, reasoning, calls, call_id, name = turn
    if judge.think_close not in content and judge.think_open not in content:
        return turn
    head, close, rest = content.partition(judge.think_close)
    opened = head.count(judge.think_open)
    # A server that puts the opening tag into the prompt returns text that starts inside the block.
    inner = head.partition(judge.think_open)[2] if opened else head
    before = head.partition(judge.think_open)[0] if opened else ""
    if not close:
        raise RowError(Reason.UNCLOSED_THINK_BLOCK, f"{judge.think_open} without {judge.think_close}")
    if opened > 1 or judge.think_open in rest or judge.think_close in rest:
        raise RowError(Reason.DUPLICATE_THINK_BLOCK, "more than one think block in one turn")
    if before.strip():
        raise RowError(Reason.UNCLOSED_THINK_BLOCK, f"text before {judge.think_open}: a literal tag, or a lost block")
    inner = inner.strip()
    if reasoning and inner and reasoning.strip() != inner:
        raise RowError(Reason.DUPLICATE_THINK_BLOCK, "reasoning_content and the block in the text disagree")
    return (role, rest.lstrip("\n"), reasoning or inner or None, calls, call_id, name)


def normalise(turns: Sequence[Turn], judge: Judge) -> list[Turn]:
    """Every assistant turn with its thinking in its own field. Raises RowError."""
    return [split_thinking(turn, judge) if turn[0] == "assistant" else turn for turn in turns]


def judge_response(turns: Sequence[Turn], judge: Judge) -> None:
    """Raise RowError when the (normalised) old responses teach nothing. Placeholders between turns are not judged
    as faults of their own: the regeneration fills them; what counts is whether any turn says something.
    """
    if turns[-1][0] != "assistant":
        raise RowError(Reason.MUST_END_WITH_ASSISTANT, f"the last turn is {turns[-1][0]}'s")
    floor, found = judge.min_content_tokens, 0
    for index, (role, content, reasoning, calls, _, _) in enumerate(turns):
        if role != "assistant":
            continue
        if not content.strip() and not calls:
            raise RowError(Reason.EMPTY_ASSISTANT, f"the assistant turn at position {index} has no text and no call")
        for text in (reasoning, content, calls):
            if text and found < floor:
                found += judge.content_tokens(text, floor - found)
    if found < floor:
        how = "" if judge.count else " (estimated from words: no target was given)"
        raise RowError(Reason.TOO_FEW_SUPERVISED_TOKENS, f"{found} content tokens, the floor is {floor}{how}")
