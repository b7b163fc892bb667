"""Template families: the markers and headers around what a target says, found from the template's text.

Nothing outside this module may know a family by name. A user adds one in a job file (`target.families`), with the
field names of `Family`; lists become tuples. Literals are copied from the published chat templates.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from tasks.errors import TargetError
from tasks.records import Role


@dataclass(frozen=True, slots=True)
class Family:
    """One family of templates. Every string is literal template text; empty means the family has no such thing.

    `detect` are texts that all occur in the template's source. `think_after_open`, `think_before_close` and
    `think_after_close` are the separators around a think block. `answer_opens` is template text that the target samples
    between thinking and answer. `implicit_stops` (answer, tool call) are end-of-turn tokens that are sampled but that
    the template does not write. `assistant_also` are other texts after which the assistant speaks. `system_is_bare` is
    not empty when the system text stands after the prefix without a header.
    """

    name: str
    detect: tuple[str, ...] = ()
    assistant_header: str = ""
    assistant_also: tuple[str, ...] = ()
    user_header: str = ""
    system_headers: tuple[str, ...] = ()
    tool_headers: tuple[str, ...] = ()
    end_of_turn: tuple[str, ...] = ()
    implicit_stops: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    system_is_bare: str = ""
    think_open: str = ""
    think_close: str = ""
    think_after_open: str = "\n"
    think_before_close: str = "\n"
    think_after_close: str = "\n\n"
    reasoning_field: str = "reasoning_content"
    answer_opens: tuple[str, ...] = ()
    tool_format: str = ""
    tool_call_open: str = ""
    tool_call_close: str = ""
    tool_response_open: str = ""
    tool_response_close: str = ""
    scaffold: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Every literal above that carries structure (for control-token detection)."""
        single = (self.think_open, self.think_close, self.tool_call_open, self.tool_call_close)
        more = (self.tool_response_open, self.tool_response_close, self.assistant_header, self.user_header)
        groups = (
            self.assistant_also,
            self.system_headers,
            self.tool_headers,
            self.end_of_turn,
            self.implicit_stops,
            self.answer_opens,
        )
        return tuple(m for m in (*single, *more, *(m for group in groups for m in group)) if m)

    @property
    def headers(self) -> tuple[tuple[str, Role], ...]:
        """(header text, role), longest first, so that a header that begins another is tried later."""
        pairs: list[tuple[str, Role]] = [(self.assistant_header, "assistant"), (self.user_header, "user")]
        pairs += [(h, "assistant") for h in self.assistant_also]
        pairs += [(h, "system") for h in self.system_headers] + [(h, "tool") for h in self.tool_headers]
        return tuple(sorted(((h, r) for h, r in pairs if h), key=lambda pair: -len(pair[0])))


_CHATML = Family(
    "chatml",
    detect=("<|im_start|>",),
    assistant_header="<|im_start|>assistant\n",
    user_header="<|im_start|>user\n",
    system_headers=("<|im_start|>system\n",),
    tool_headers=("<|im_start|>tool\n",),
    end_of_turn=("<|im_end|>",),
)
_CHATML_TOOLS = replace(
    _CHATML,
    name="chatml-tools",
    detect=("<|im_start|>", "<tool_call>"),
    tool_format="json_tags",
    tool_call_open="<tool_call>",
    tool_call_close="</tool_call>",
    tool_response_open="<tool_response>",
    tool_response_close="</tool_response>",
)
_QWEN3 = replace(
    _CHATML_TOOLS,
    name="qwen3",
    detect=("<|im_start|>", "</think>", "<tool_call>"),
    think_open="<think>",
    think_close="</think>",
)
_QWEN36 = replace(_QWEN3, name="qwen3.6", detect=(*_QWEN3.detect, "<function="), tool_format="xml_function")
_NEMOTRON = replace(_QWEN36, name="nemotron3", detect=(*_QWEN36.detect, "<think></think>"), think_after_close="\n")
_GLM = Family(
    "glm4.5",
    detect=("[gMASK]<sop>", "<|assistant|>"),
    assistant_header="<|assistant|>",
    user_header="<|user|>\n",
    system_headers=("<|system|>\n",),
    tool_headers=("<|observation|>",),
    end_of_turn=("<|user|>", "<|observation|>", "<|endoftext|>"),
    implicit_stops=("<|user|>", "<|observation|>"),
    prefix=("[gMASK]", "<sop>"),
    think_open="<think>",
    think_close="</think>",
    think_after_open="",
    think_before_close="",
    think_after_close="\n",
    tool_format="glm_arguments",
    tool_call_open="<tool_call>",
    tool_call_close="</tool_call>",
    tool_response_open="<tool_response>",
    tool_response_close="</tool_response>",
)
_DEEPSEEK = Family(
    "deepseek-v3",
    detect=("<｜Assistant｜>", "<｜User｜>"),
    assistant_header="<｜Assistant｜>",
    user_header="<｜User｜>",
    assistant_also=("<｜tool▁outputs▁end｜>",),
    tool_headers=("<｜tool▁outputs▁begin｜>",),
    end_of_turn=("<｜end▁of▁sentence｜>",),
    prefix=("<｜begin▁of▁sentence｜>",),
    system_is_bare="yes",
    think_open="<think>",
    think_close="</think>",
    tool_format="deepseek",
    tool_call_open="<｜tool▁calls▁begin｜>",
    tool_call_close="<｜tool▁calls▁end｜>",
    tool_response_open="<｜tool▁output▁begin｜>",
    tool_response_close="<｜tool▁output▁end｜>",
)
_HARMONY = Family(
    "gpt-oss",
    detect=("<|channel|>analysis<|message|>", "<|start|>assistant"),
    assistant_header="<|start|>assistant",
    user_header="<|start|>user<|message|>",
    system_headers=("<|start|>system<|message|>", "<|start|>developer<|message|>"),
    tool_headers=("<|start|>functions.",),
    end_of_turn=("<|return|>", "<|call|>", "<|end|>"),
    think_open="<|channel|>analysis<|message|>",
    think_close="<|end|>",
    think_after_open="",
    think_before_close="",
    think_after_close="<|start|>assistant<|channel|>final<|message|>",
    reasoning_field="thinking",
    answer_opens=("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>"),
    tool_format="harmony",
    scaffold=(
        "<|channel|>analysis<|message|>",
        "<|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    ),
)
_LLAMA3 = Family(
    "llama3",
    detect=("<|start_header_id|>", "<|eot_id|>"),
    assistant_header="<|start_header_id|>assistant<|end_header_id|>\n\n",
    user_header="<|start_header_id|>user<|end_header_id|>\n\n",
    system_headers=("<|start_header_id|>system<|end_header_id|>\n\n",),
    tool_headers=("<|start_header_id|>ipython<|end_header_id|>\n\n", "<|start_header_id|>tool<|end_header_id|>\n\n"),
    end_of_turn=("<|eot_id|>", "<|eom_id|>"),
    prefix=("<|begin_of_text|>",),
    tool_format="bare_json",
)
_GEMMA = Family(
    "gemma",
    detect=("<start_of_turn>", "<end_of_turn>"),
    assistant_header="<start_of_turn>model\n",
    user_header="<start_of_turn>user\n",
    end_of_turn=("<end_of_turn>",),
    prefix=("<bos>",),
)
_GEMMA4 = Family(
    "gemma4",
    detect=("<|turn>", "<turn|>"),
    assistant_header="<|turn>model\n",
    user_header="<|turn>user\n",
    system_headers=("<|turn>system\n",),
    end_of_turn=("<turn|>",),
    prefix=("<bos>",),
    think_open="<|channel>thought\n",
    think_close="<channel|>",
    think_after_open="",
    think_after_close="",
)
_PHI = Family(
    "phi3",
    detect=("<|assistant|>", "<|end|>"),
    assistant_header="<|assistant|>\n",
    user_header="<|user|>\n",
    system_headers=("<|system|>\n",),
    end_of_turn=("<|end|>", "<|endoftext|>"),
)

FAMILIES: tuple[Family, ...] = (
    _NEMOTRON,
    _QWEN36,
    _QWEN3,
    _CHATML_TOOLS,
    _CHATML,
    _GLM,
    _DEEPSEEK,
    _HARMONY,
    _LLAMA3,
    _GEMMA4,
    _GEMMA,
    _PHI,
)
"""Tried in this order; the more particular description of a header style stands first."""


def find_family(
    template: str, wanted: str = "auto", more: Mapping[str, Mapping[str, str | Sequence[str] | None]] | None = None
) -> Family | None:
    """The family called `wanted`, or the first whose `detect` texts all occur in `template`; None when none fits.

    `more` are a user's own descriptions and win over the built-in ones. Raises TargetError for an unknown name.
    """
    known = [*(describe(name, entry) for name, entry in (more or {}).items()), *FAMILIES]
    if wanted != "auto":
        named = [family for family in known if family.name == wanted]
        if not named:
            names = ", ".join(family.name for family in known)
            raise TargetError(f"target.family is {wanted!r}; known are {names}; describe it in target.families")
        return named[0]
    return next((f for f in known if f.detect and all(text in template for text in f.detect)), None)


def describe(name: str, entry: Mapping[str, str | Sequence[str] | None]) -> Family:
    """A user's description as a Family. `base: <name>` starts from a built-in one. Raises TargetError."""
    values = dict(entry)
    base = str(values.pop("base", None) or "")
    start = next((f for f in FAMILIES if f.name == base), None)
    if base and start is None:
        raise TargetError(f"target.families.{name}.base is {base!r}; known are {', '.join(f.name for f in FAMILIES)}")
    kinds = {field.name: field.type for field in fields(Family)}
    unknown = sorted(set(values) - set(kinds))
    if unknown:
        raise TargetError(f"target.families.{name} has {', '.join(unknown)}; fields are base, {', '.join(kinds)}")
    converted = {key: _convert(value, kinds[key] is str) for key, value in values.items()}
    return replace(start or Family(name), **{**converted, "name": name})  # type: ignore[arg-type]


def _convert(value: str | Sequence[str] | None, single: bool) -> str | tuple[str, ...]:
    if single:
        return "" if value is None else value if isinstance(value, str) else "".join(value)
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def as_dict(family: Family) -> dict[str, object]:
    """JSON-able form, for run records."""
    return dataclasses.asdict(family)
