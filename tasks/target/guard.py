"""Control tokens in somebody's text are data, never structure.

A guarded tokenizer is the target's own, in which every control token is spelled between two noncharacters. Template
structure is rewritten to that spelling before encoding, so the same letters inside a message stay ordinary sub-words.
Decoding with it tells structure from text in the same way.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Unicode noncharacters: meant for use inside a process, never for interchange."""
_HOLD_OPEN, _HOLD_CLOSE = "\ufdd2", "\ufdd3"
_RESERVED = re.compile("[\ufdd0-\ufdd3]")


def pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `tokens`, longest first; matches nothing when there are none."""
    return re.compile("|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True)) or r"(?!)")


def guard(text: str, control: re.Pattern[str]) -> str:
    """Spell every control token of `text` in the guarded way."""
    return control.sub(lambda match: f"{OPEN}{match[0]}{CLOSE}", text)


def unguard(text: str) -> str:
    """Drop the guards."""
    return text.replace(OPEN, "").replace(CLOSE, "")


class Literals:
    """Hides control tokens of message texts from the template, and puts them back as text after rendering."""

    def __init__(self, control: re.Pattern[str], visible: Sequence[str] = ()) -> None:
        self._control, self._visible = control, set(visible)
        self._held: list[str] = []

    def hide(self, text: str, assistant: bool = False) -> str:
        """Replace control tokens by placeholders. An assistant's think markers stay: templates split at them.

        Raises ValueError when the text holds the noncharacters that this module uses.
        """
        if _RESERVED.search(text):
            raise ValueError("text holds Unicode noncharacters U+FDD0..U+FDD3, which no text may interchange")

        def hold(match: re.Match[str]) -> str:
            if assistant and match[0] in self._visible:
                return match[0]
            self._held.append(match[0])
            return f"{_HOLD_OPEN}{len(self._held) - 1}{_HOLD_CLOSE}"

        return self._control.sub(hold, text)

    def show(self, rendered: str) -> str:
        """Guard the structure of `rendered` and put the hidden texts back. Raises ValueError if one was torn."""
        guarded = guard(rendered, self._control)
        shown = re.sub(f"{_HOLD_OPEN}(\\d+){_HOLD_CLOSE}", lambda match: self._held[int(match[1])], guarded)
        if _HOLD_OPEN in shown or _HOLD_CLOSE in shown:
            raise ValueError("the template tore a control token that stands in a message's text")
        return shown


def guarded_tokenizer(tokenizer_json: str, control: Iterable[str]) -> Tokenizer:
    """The same tokenizer with its control tokens renamed to their guarded spelling, ids unchanged."""
    names = {token: f"{OPEN}{token}{CLOSE}" for token in control}
    data: dict[str, Any] = json.loads(tokenizer_json)
    for added in data.get("added_tokens", []):
        added["content"] = names.get(added["content"], added["content"])
    model = data["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if not _byte_level(data.get("post_processor")):
        data["post_processor"] = None  # it names special tokens, and is never used: nothing is added here
    data["truncation"] = data["padding"] = None
    return Tokenizer.from_str(json.dumps(data))


def _byte_level(post_processor: Any) -> bool:
    return isinstance(post_processor, dict) and post_processor.get("type") == "ByteLevel"
