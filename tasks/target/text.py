"""The target's own words for everything: its template, its tokenizer, its markers. No torch, no weights."""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from tasks.records import Message
from tasks.settings import TargetSettings
from tasks.target import guard
from tasks.target.counts import Counts, CountTables, SupervisedCounts, build_tables, count_many, count_one
from tasks.target.family import Family
from tasks.target.parse import Answer, TurnReader
from tasks.target.template import ChatTemplate, template_kwargs


class TargetText:
    """Renders, encodes, decodes and counts as the target does. Build it with `tasks.target.load.load_target`.

    Pickles as its settings; a worker process loads it again from its directory (about 1.5 s).
    """

    def __init__(
        self,
        settings: TargetSettings,
        directory: Path,
        template: str,
        tokenizer_json: str,
        special: Mapping[str, str],
        config: dict[str, Any],
        generation_config: dict[str, Any],
        family: Family,
        template_origin: str,
    ) -> None:
        self.settings, self.directory = settings, directory
        self.template, self.special = template, dict(special)
        self.config, self.generation_config = config, generation_config
        self.family = family
        self.tokenizer_json = tokenizer_json
        self.template_sha256 = hashlib.sha256(template.encode()).hexdigest()
        self.tokenizer_sha256 = hashlib.sha256(tokenizer_json.encode()).hexdigest()
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocab_size = max(self.tokenizer.get_vocab_size(with_added_tokens=True), _vocab(config))
        self.control_tokens = self._find_control()
        self._control = guard.pattern(self.control_tokens)
        self.end_ids = frozenset(self._single(family.end_of_turn)) | frozenset(self._single(family.implicit_stops))
        self.eos_ids = self._eos()
        self._chat = ChatTemplate(template, special, family.reasoning_field, template_origin)

    def __reduce__(self) -> tuple[Callable[[TargetSettings], "TargetText"], tuple[TargetSettings]]:
        from tasks.target.load import load_target

        return load_target, (self.settings,)

    # --- rendering -------------------------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: str | None = None,
        thinking: bool = True,
        preserve_thinking: bool = False,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """The template's text. `now` is what a template that prints the date reads (default: when this was loaded).

        Raises ValueError with the template's own message when it refuses the messages.
        """
        kwargs = template_kwargs(thinking, preserve_thinking)
        return self._chat.render(messages, tools, kwargs, add_generation_prompt, now)

    @property
    def reads_clock(self) -> bool:
        """Whether the template prints the date."""
        return self._chat.reads_clock

    # --- tokens ----------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; control tokens in it are structure, nothing is added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: list[str]) -> list[Encoding]:
        """Encodings with offsets, all cores (see TOKENIZERS_PARALLELISM)."""
        encodings: list[Encoding] = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return encodings

    def encode_batch_fast(self, texts: list[str]) -> list[Encoding]:
        """Encodings without offsets: about a tenth faster."""
        encodings: list[Encoding] = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return encodings

    @functools.cached_property
    def byte_lengths(self) -> NDArray[np.int32] | None:
        """UTF-8 bytes that each token stands for, by id; None when tokens are not spelled in bytes.

        Where the lengths of a row's tokens sum to the text's, their cumulative sum is the offsets of the tokenization.
        """
        normalizer = self.tokenizer.normalizer
        if type(self.tokenizer.decoder).__name__ != "ByteLevel" or type(normalizer).__name__ not in ("NFC", "NoneType"):
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for token, index in self.tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[index] = len(token)  # one character a byte
        for index, added in self.tokenizer.get_added_tokens_decoder().items():
            lengths[index] = len(added.content.encode())
        return lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Text with control tokens kept."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def prompt_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: str | None = None,
        thinking: bool = True,
        preserve_thinking: bool = False,
        now: datetime | None = None,
    ) -> list[int]:
        """Ids of the rendered prompt, generation prompt included. Control tokens in message texts are sub-words.

        Raises ValueError when the template refuses the messages.
        """
        options: dict[str, Any] = {"thinking": thinking, "preserve_thinking": preserve_thinking, "now": now}
        if not self.has_control(messages, tools):
            return self.encode(self.render(messages, tools=tools, **options))
        return self.encode_guarded(self.render_guarded(messages, tools=tools, **options))

    def has_control(self, messages: Sequence[Message], tools: str | None = None) -> bool:
        """Whether any text in the messages spells a control token."""
        search = self._control.search
        texts = (t for m in messages for t in (m.content, m.reasoning_content, m.tool_calls) if t)
        return any(search(text) for text in texts) or bool(tools and search(tools))

    def render_guarded(
        self,
        messages: Sequence[Message],
        *,
        tools: str | None = None,
        thinking: bool = True,
        preserve_thinking: bool = False,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """`render`, with structure spelled so that it cannot be mistaken for a message's text (see guard.py)."""
        literals = guard.Literals(self._control, (self.family.think_open, self.family.think_close))
        hidden = [
            Message(
                m.role,
                literals.hide(m.content, m.role == "assistant"),
                literals.hide(m.reasoning_content, True) if m.reasoning_content is not None else None,
                literals.hide(m.tool_calls) if m.tool_calls else None,
                m.tool_call_id,
                m.name,
            )
            for m in messages
        ]
        text = self.render(
            hidden,
            tools=literals.hide(tools) if tools else None,
            thinking=thinking,
            preserve_thinking=preserve_thinking,
            add_generation_prompt=add_generation_prompt,
            now=now,
        )
        return literals.show(text)

    def encode_guarded(self, text: str) -> list[int]:
        """Ids of guarded text."""
        ids: list[int] = self.guarded.encode(text, add_special_tokens=False).ids
        return ids

    @functools.cached_property
    def guarded(self) -> Tokenizer:
        """The guarded tokenizer, built when first needed (about 2 s for 250K tokens)."""
        return guard.guarded_tokenizer(self.tokenizer_json, self.control_tokens)

    def guard(self, text: str) -> str:
        """`text` with its control tokens in guarded spelling."""
        return guard.guard(text, self._control)

    def decode_guarded(self, ids: Sequence[int]) -> str:
        """Text in which structure is guarded."""
        text: str = self.guarded.decode(list(ids), skip_special_tokens=False)
        return text

    def find_control_tokens(self, text: str) -> list[str]:
        """Every control token spelled in `text`, in order."""
        return self._control.findall(text)

    # --- counting and reading --------------------------------------------------------------------------------------

    @functools.cached_property
    def tables(self) -> CountTables:
        """Lookup tables of `count_many`."""
        stops = {*self.eos_ids, *self.end_ids}
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        return build_tables(self.family, vocab, self.vocab_size, self.encode, stops)

    def prepare(self) -> None:
        """Build the lookup tables now rather than with the first row."""
        _ = self.tables, self.byte_lengths

    def count(self, ids: Sequence[int], mask: Sequence[int]) -> SupervisedCounts:
        """Supervised, scaffold and content tokens of one row."""
        return count_one(self.tables, ids, mask)

    def count_many(self, values: NDArray[Any], offsets: NDArray[Any], mask: NDArray[Any]) -> Counts:
        """(n_supervised, n_scaffold, n_content), one entry a row (see counts.count_many)."""
        return count_many(self.tables, values, offsets, mask)

    def parse_answer(self, ids: Sequence[int], *, thinking: bool = True) -> Answer:
        """What sampled ids say. `thinking` is what was asked for; it matters when the prompt opens the think block."""
        return self._reader.answer(self.decode_guarded(ids), thinking and self.prompt_opens_thinking)

    def split_conversation(self, ids: Sequence[int]) -> list[Message]:
        """Messages of a tokenized row, by the template's turn headers; pads at the end are ignored.

        Raises ValueError when the row does not decode into turns.
        """
        ids = list(ids)
        while ids and ids[-1] in self._pads:
            ids.pop()
        messages = self._reader.messages(self.decode_guarded(ids))
        default = self._default_messages
        return messages[len(default) :] if default and tuple(messages[: len(default)]) == default else messages

    @functools.cached_property
    def _default_messages(self) -> tuple[Message, ...]:
        """The system turns that the template writes by itself: rendering would write them again."""
        try:
            text = self.render_guarded([Message("user", "x")], add_generation_prompt=False)
            return tuple(message for message in self._reader.messages(text) if message.role == "system")
        except ValueError:
            return ()

    @functools.cached_property
    def prompt_opens_thinking(self) -> bool:
        """Whether the generation prompt in thinking mode already holds the opening think marker."""
        family = self.family
        if not family.think_open:
            return False
        prompt = self.render([Message("user", "x")], thinking=True)
        return prompt.rstrip("\n").endswith(family.think_open.rstrip("\n"))

    @functools.cached_property
    def _reader(self) -> TurnReader:
        extra = [self.special.get("eos_token", ""), *(self.tokenizer.id_to_token(i) or "" for i in self.eos_ids)]
        return TurnReader(self.family, self._control, extra)

    @functools.cached_property
    def _pads(self) -> frozenset[int]:
        names = [self.special.get("pad_token", ""), *self.family.end_of_turn]
        return frozenset(self._single([name for name in names if name])) | frozenset(self.eos_ids)

    def _single(self, texts: Sequence[str]) -> list[int]:
        ids = (self.tokenizer.token_to_id(text) for text in texts)
        return [index for index in ids if index is not None]

    def _find_control(self) -> frozenset[str]:
        source = "\0".join((self.template, *self.family.markers, *self.special.values()))
        found = set()
        for added in self.tokenizer.get_added_tokens_decoder().values():
            text = added.content
            bracketed = text.startswith(("<|", "<｜")) and text.endswith((">", "｜>"))
            if text.strip() and not text.isalnum() and (added.special or bracketed or text in source):
                found.add(text)
        return frozenset(found)

    def _eos(self) -> tuple[int, ...]:
        ids: list[int] = []
        for value in (self.generation_config.get("eos_token_id"), self.config.get("eos_token_id")):
            ids += [value] if isinstance(value, int) else value if isinstance(value, list) else []
        ids += self._single([self.special["eos_token"]]) if self.special.get("eos_token") else []
        return tuple(dict.fromkeys(ids))


def _vocab(config: Mapping[str, Any]) -> int:
    text = config.get("text_config")
    sizes = (config.get("vocab_size"), text.get("vocab_size") if isinstance(text, dict) else None)
    return max((size for size in sizes if isinstance(size, int)), default=0)
