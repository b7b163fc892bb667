"""What is done with one parsed row: the same for every format, in every worker."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.validation.canonical import Turn, conversation
from tasks.validation.identity import digests, prompt_turns
from tasks.validation.order import check_order
from tasks.validation.overlap import ngrams
from tasks.validation.reasons import Reason, RowError
from tasks.validation.responses import Judge, judge_response, normalise
from tasks.validation.settings import SourceSettings

if TYPE_CHECKING:  # importing it loads transformers, which a set without a target need not wait for
    from tasks.target.text import TargetText

NOTHING = re.compile(r"(?!)")


class KeptRow(NamedTuple):
    """A usable row: one id a sample, and what is stored under it. A tuple: a million of them are made."""

    ids: list[str]
    turns: list[Turn]
    tools: str | None
    regenerate_reason: str | None = None
    old_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """How rows are judged. Picklable; `target` rides along to the workers.

    `by_row`: two rows are the same only when their answers are, too (a set may hold several answers to one prompt).
    """

    settings: SourceSettings
    target: "TargetText | None"
    samples: int = 1
    for_training: bool = False
    judge: Judge = field(default_factory=Judge)
    control: re.Pattern[str] = NOTHING
    benchmark_ngrams: frozenset[int] = field(default_factory=frozenset)

    @property
    def by_row(self) -> bool:
        """Whether ids are of whole rows rather than of prompts."""
        return self.settings.duplicates == "row" or (self.settings.duplicates == "auto" and self.for_training)

    def keep(self, row: Any, *, columnar: bool = False) -> KeptRow:
        """Judge one row. Raises RowError with the reason it is rejected for."""
        turns, tools = conversation(row, columnar=columnar)
        return self.keep_turns(turns, tools)

    def keep_turns(self, turns: list[Turn], tools: str | None, old: tuple[str | None, int] | None = None) -> KeptRow:
        """Judge a canonical conversation. `old` is (regenerate reason, tokens) where its response is known already."""
        if self.for_training:
            check_order(turns)
            turns = normalise(turns, self.judge)
            judge_response(turns, self.judge)
            self._check_text(turns)
            return KeptRow(self._ids(turns, tools), turns, tools)
        prompt = prompt_turns(turns)
        if not prompt:
            raise RowError(Reason.NO_USER_TURN, "there are only assistant turns")
        check_order(prompt)
        self._check_text(prompt)
        fault, tokens = old if old else (self._response_fault(turns), None)
        return KeptRow(digests(prompt, tools, self.samples), prompt, tools, fault, tokens)

    def _ids(self, turns: list[Turn], tools: str | None) -> list[str]:
        return digests(turns if self.by_row else prompt_turns(turns), tools, self.samples)

    def _response_fault(self, turns: list[Turn]) -> str | None:
        if turns[-1][0] != "assistant":
            return None
        try:
            judge_response(normalise(turns, self.judge), self.judge)
        except RowError as error:
            return error.reason.value
        return None

    def _check_text(self, turns: list[Turn]) -> None:
        """Control tokens and benchmark n-grams. An assistant's text is the target's own business only in training."""
        if self.control is not NOTHING:
            search = self.control.search
            for role, content, *_ in turns:
                found = search(content)
                if found:
                    raise RowError(Reason.CONTROL_TOKEN_IN_CONTENT, f"{found[0]!r} in the {role}'s text")
        if self.benchmark_ngrams:
            width = self.settings.decontaminate_ngram
            for role, content, *_ in turns:
                if role == "user" and not self.benchmark_ngrams.isdisjoint(ngrams(content, width)):
                    raise RowError(Reason.CONTAMINATED, f"{width} words in a row are those of a benchmark")


def make_policy(
    settings: SourceSettings,
    target: "TargetText | None",
    *,
    samples: int = 1,
    for_training: bool = False,
    benchmark_ngrams: Iterable[int] = (),
) -> Policy:
    """The policy of one validation."""
    judge, control = Judge(min_content_tokens=settings.min_content_tokens), NOTHING
    if target is not None:
        family = target.family
        markers = (family.think_open, family.think_close) if family.think_close else ("<think>", "</think>")
        judge = Judge(*markers, settings.min_content_tokens, TokenCount(target))
        if settings.control_tokens == "reject" and target.control_tokens:
            longest_first = sorted(target.control_tokens, key=len, reverse=True)
            control = re.compile("|".join(map(re.escape, longest_first)))
    return Policy(settings, target, samples, for_training, judge, control, frozenset(benchmark_ngrams))


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens of a text under the target's tokenizer (a picklable callable)."""

    target: "TargetText"

    def __call__(self, text: str) -> int:
        """How many tokens `text` is."""
        return len(self.target.encode(text))
