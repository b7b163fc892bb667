"""A batch of completions becomes token rows and rejects. Pure: arrays in, Arrow record batches out."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa

from tasks.target.text import TargetText
from tasks.tokenization.answers import Span, Unusable, render, sampled_span
from tasks.tokenization.items import Ids, Item, read_items
from tasks.tokenization.masks import first_by_bytes, first_sampled, flat_mask
from tasks.tokenization.reasons import Reason
from tasks.tokenization.schema import IDS, MASK, REJECTED, TOKENS
from tasks.tokenization.settings import TokenizationSettings

DAYS_BACK = 2
"""A template that prints the date is tried with this many earlier days: a chunk may have been sent before midnight."""


@dataclass(frozen=True, slots=True)
class Built:
    """What one batch gave."""

    tokens: pa.RecordBatch
    rejected: pa.RecordBatch
    methods: dict[str, int]


class RowBuilder:
    """Builds rows for one target and one set of policies."""

    def __init__(
        self, target: TargetText, settings: TokenizationSettings, preserve_thinking: bool, now: datetime | None = None
    ) -> None:
        self._target, self._settings = target, settings
        self._preserve, self._now = preserve_thinking, now
        self._rejects: list[tuple[str, int, Reason, str]] = []

    def build(self, completions: pa.RecordBatch) -> Built:
        """Rows of every assistant turn of these completions; every turn ends as a row or a reject."""
        self._rejects = []
        items = list(read_items(completions, self._preserve, self._now, self._reject))
        known = [item for item in items if len(item.token_ids)]
        texts = [item for item in items if not len(item.token_ids)]
        ready = [*self._with_ids(known), *self._with_text(texts)]
        position = {id(item): index for index, item in enumerate(items)}
        ready.sort(key=lambda item: position[id(item)])
        final = [item for item in ready if self._finish(item)]
        tokens = self._assemble(final)
        methods = Counter(tokens.column("mask_method").to_pylist())
        return Built(tokens, self._rejected(), dict(methods))

    def _reject(self, prompt_id: str, turn: int, reason: Reason, detail: str) -> None:
        self._rejects.append((prompt_id, turn, reason, detail[:500]))

    # --- rows with the server's ids --------------------------------------------------------------------------------

    def _with_ids(self, items: Sequence[Item]) -> list[Item]:
        """Prompt ids + sampled ids, after comparing the prompt with the target's own rendering of the history."""
        prompts = self._encode_prompts(items)
        ready = []
        for item, ours in zip(items, prompts, strict=True):
            if ours is None:
                continue
            given = item.prompt_ids
            mismatch = self._mismatch(item, ours)
            if mismatch:
                self._reject(item.prompt_id, item.turn, Reason.RENDER_MISMATCH, mismatch)
                continue
            prompt = given if len(given) else ours
            item.exact = len(given) > 0
            sampled = self._with_end(item)
            item.ids = np.concatenate((prompt, sampled))
            item.start, item.end = len(prompt), len(item.ids)
            ready.append(item)
        return ready

    def _mismatch(self, item: Item, ours: Ids) -> str | None:
        """How the server's prompt differs from ours. An engine that reports no prompt ids is held to their number."""
        given = item.prompt_ids
        if not len(given):
            counted = item.prompt_tokens
            if counted is None or counted == len(ours):
                return None
            return f"the server counted {counted} prompt tokens, the template gives {len(ours)}"
        if np.array_equal(given, ours) or (self._target.reads_clock and self._other_day(item) is not None):
            return None
        return describe_difference(given, ours)

    def _with_end(self, item: Item) -> Ids:
        """Engines that report no id for the stop: the end of turn was sampled, since the answer ended by itself."""
        ids, ends = item.token_ids, self._target.end_ids | set(self._target.eos_ids)
        if item.finish_reason not in ("stop", "tool_calls") or not ends or int(ids[-1]) in ends:
            return ids
        stop = self._target.family.end_of_turn[:1] + self._target.family.implicit_stops[:1]
        end = self._target.tokenizer.token_to_id(stop[-1]) if stop else None
        return ids if end is None else np.append(ids, np.int32(end))

    def _encode_prompts(self, items: Sequence[Item]) -> list[Ids | None]:
        texts: list[str] = []
        where: list[int] = []
        found: list[Ids | None] = [None] * len(items)
        for index, item in enumerate(items):
            try:
                guarded = self._target.has_control(item.context.history, item.context.tools)
                text = render(self._target, item.context, guarded)
            except Unusable as error:
                self._reject(item.prompt_id, item.turn, error.reason, error.detail)
                continue
            if guarded:
                found[index] = np.asarray(self._target.encode_guarded(text), dtype=np.int32)
            else:
                texts.append(text)
                where.append(index)
        encodings = self._target.encode_batch_fast(texts)
        for index, encoding in zip(where, encodings, strict=True):
            found[index] = np.asarray(encoding.ids, dtype=np.int32)
        return found

    def _other_day(self, item: Item) -> Ids | None:
        now = self._now or datetime.now().astimezone()
        for days in range(1, DAYS_BACK + 1):
            context = item.context
            ids = self._target.prompt_ids(
                context.history,
                tools=context.tools,
                thinking=context.thinking,
                preserve_thinking=context.preserve_thinking,
                now=now - timedelta(days=days),
            )
            if np.array_equal(item.prompt_ids, ids):
                return item.prompt_ids
        return None

    # --- rows from text --------------------------------------------------------------------------------------------

    def _with_text(self, items: Sequence[Item]) -> list[Item]:
        """One tokenization of prompt and answer; the mask comes from its offsets."""
        spans: list[Span] = []
        usable: list[Item] = []
        for item in items:
            try:
                spans.append(sampled_span(self._target, item.context, item.answer, item.finish_reason))
                usable.append(item)
            except Unusable as error:
                self._reject(item.prompt_id, item.turn, error.reason, error.detail)
        for item, span, (ids, start) in zip(usable, spans, self._encode_spans(spans), strict=True):
            item.ids, item.start, item.end = ids, start, len(ids)
            item.method = span.method
        return usable

    def _encode_spans(self, spans: Sequence[Span]) -> Iterator[tuple[Ids, int]]:
        """(ids, index of the first sampled token) of each span, from one tokenization of its text."""
        lengths = self._target.byte_lengths
        texts = [span.text for span in spans if not span.guarded]
        encode = self._target.encode_batch if lengths is None else self._target.encode_batch_fast
        plain = iter(encode(texts))
        for span in spans:
            if not span.guarded:
                ids = np.asarray(next(plain).ids, dtype=np.int32)
                start = None if lengths is None else first_by_bytes(lengths, ids, span)
                if start is not None:
                    yield ids, start
                    continue
            tokenizer = self._target.guarded if span.guarded else self._target.tokenizer
            encoding = tokenizer.encode(span.text, add_special_tokens=False)
            yield np.asarray(encoding.ids, dtype=np.int32), first_sampled(encoding, span)

    # --- policies on the final arrays ------------------------------------------------------------------------------

    def _finish(self, item: Item) -> bool:
        problem = self._answer_only(item) or self._ids_problem(item) or self._cut(item)
        if problem:
            self._reject(item.prompt_id, item.turn, *problem)
        return problem is None

    def _answer_only(self, item: Item) -> tuple[Reason, str] | None:
        if self._settings.mask != "answer_only" or not self._target.family.think_close:
            return None
        closing = np.asarray(self._target.encode(self._target.family.think_close), dtype=np.int32)
        sampled = item.ids[item.start : item.end]
        if len(sampled) < len(closing):
            return None
        windows = np.lib.stride_tricks.sliding_window_view(sampled, len(closing))
        hits = np.flatnonzero((windows == closing).all(axis=1))
        if len(hits):
            item.start += int(hits[0]) + len(closing)
        elif item.answer.reasoning_content and not item.answer.content.strip():
            return Reason.TOO_FEW_SUPERVISED_TOKENS, "the answer was cut inside its thinking; mask is answer_only"
        return None

    def _ids_problem(self, item: Item) -> tuple[Reason, str] | None:
        ids = item.ids
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._target.vocab_size):
            found = f"ids {int(ids.min())}..{int(ids.max())}, vocabulary {self._target.vocab_size}"
            return Reason.ID_OUT_OF_RANGE, found
        before_last = ids[item.start : item.end - 1]
        stops = np.zeros(len(before_last), dtype=np.bool_)
        for end in self._target.eos_ids:  # one or two: cheaper than np.isin
            stops |= before_last == end
        inside = np.flatnonzero(stops)
        if len(inside):
            return Reason.STOP_TOKEN_INSIDE, f"{len(inside)} stop ids before the last, first at {int(inside[0])}"
        return None

    def _cut(self, item: Item) -> tuple[Reason, str] | None:
        limit = self._settings.max_length
        if limit is None or len(item.ids) <= limit:
            return None
        if self._settings.on_too_long == "reject":
            return Reason.TOO_LONG, f"{len(item.ids)} tokens, {limit} allowed"
        if item.start >= limit:
            found = f"the prompt's {item.start} tokens fill the {limit} allowed"
            return Reason.NO_SUPERVISED_TOKENS_AFTER_TRUNCATION, found
        item.ids, item.end, item.truncated = item.ids[:limit], min(item.end, limit), True
        return None

    def _assemble(self, items: Sequence[Item]) -> pa.RecordBatch:
        lengths = np.fromiter((len(item.ids) for item in items), dtype=np.int64, count=len(items))
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        values = np.concatenate([item.ids for item in items]) if items else np.zeros(0, np.int32)
        mask = flat_mask([(item.start, item.end) for item in items], offsets)
        supervised, scaffold, content = self._target.count_many(values, offsets, mask)
        keep = content >= self._settings.min_content_tokens
        for index in np.flatnonzero(~keep).tolist():
            self._too_few(items[index], int(supervised[index]), int(content[index]))
        columns = [
            pa.array([item.prompt_id for item in items], pa.string()),
            pa.array([item.turn for item in items], pa.int32()),
            pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values, pa.int32()), type=IDS),
            pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(mask, pa.int8()), type=MASK),
            *(pa.array(counts.astype(np.int32)) for counts in (supervised, scaffold, content)),
            pa.array([item.finish_reason for item in items], pa.string()),
            pa.array([item.exact for item in items], pa.bool_()),
            pa.array(["server" if item.method == "server_ids" else "retokenized" for item in items], pa.string()),
            pa.array([item.method for item in items], pa.string()),
            pa.array([difference(item) for item in items], pa.int32()),
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=TOKENS)
        return batch if keep.all() else batch.filter(pa.array(keep))

    def _too_few(self, item: Item, supervised: int, content: int) -> None:
        found = f"{content} content tokens of {supervised} supervised, {self._settings.min_content_tokens} wanted"
        reason = Reason.TOO_FEW_SUPERVISED_TOKENS
        if item.truncated:
            reason, found = Reason.NO_SUPERVISED_TOKENS_AFTER_TRUNCATION, f"after the cut, {found}"
        self._reject(item.prompt_id, item.turn, reason, found)

    def _rejected(self) -> pa.RecordBatch:
        rows = [dict(zip(REJECTED.names, (p, t, r.value, d), strict=True)) for p, t, r, d in self._rejects]
        return pa.RecordBatch.from_pylist(rows, schema=REJECTED)


def difference(item: Item) -> int | None:
    """Sampled tokens here minus those the server counted, for rows made from text."""
    if item.method == "server_ids" or item.completion_tokens is None:
        return None
    return item.end - item.start - item.completion_tokens


def describe_difference(given: Ids, ours: Ids) -> str:
    """Where two prompts part, for a person."""
    shorter = min(len(given), len(ours))
    unequal = np.flatnonzero(given[:shorter] != ours[:shorter])
    at = int(unequal[0]) if len(unequal) else shorter
    shown = f"server {given[at : at + 4].tolist()}, template {ours[at : at + 4].tolist()}"
    return f"prompt ids part at {at} of {len(given)} (server) and {len(ours)} (template): {shown}"
