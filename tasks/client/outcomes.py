"""What a request is, and every way it can end. Plain values: no network, no engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

IdsSource = Literal["server", "logprobs", "none"]


class OutcomeKind(StrEnum):
    """How a request ended. Only OK is an answer; CUT is one that ran into its token limit."""

    OK = "ok"
    CUT = "cut"  # finish_reason length
    ABORTED = "aborted"  # HTTP 200 with finish_reason abort: looks like success by status
    RETRY_LATER = "retry_later"  # 408, 409, 425, 429, 503
    SERVER_ERROR = "server_error"  # other 5xx
    CONNECTION = "connection"  # refused, reset, or the body ended early
    TIMEOUT = "timeout"
    BAD_REQUEST = "bad_request"  # other 4xx: sending it again would not help
    OVERFLOW = "overflow"  # prompt and limit do not fit the server's context window
    MALFORMED = "malformed"  # 200, but not an answer: garbage, missing choices, unknown finish_reason


RETRYABLE = frozenset(
    {
        OutcomeKind.ABORTED,
        OutcomeKind.RETRY_LATER,
        OutcomeKind.SERVER_ERROR,
        OutcomeKind.CONNECTION,
        OutcomeKind.TIMEOUT,
        OutcomeKind.MALFORMED,
    }
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of one request; None leaves the server's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    max_tokens: int = 1024
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat completion. `messages` are as the server gets them; `prompt_ids` is for /generate (SGLang < 0.5.17)."""

    request_id: str
    messages: Sequence[Mapping[str, Any]]
    sampling: Sampling = Sampling()
    tools: Sequence[Mapping[str, Any]] | None = None
    thinking: bool | None = None
    preserve_thinking: bool = False
    prompt_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    stop: Sequence[str] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatOutcome:
    """How one request ended, with everything the server told. Seconds; token ids where the server gives them.

    `content` and `reasoning_content` are as the server parsed them; with `parsed` False (/generate) `content` is the
    whole text and only `token_ids` are exact. `tool_calls` is JSON text in OpenAI's list form.
    """

    kind: OutcomeKind
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: str | None = None
    finish_reason: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    token_ids: Sequence[int] | None = None
    ids_source: IdsSource = "none"
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    accept_length: float | None = None
    verify_ct: int | None = None
    latency_s: float = 0.0
    ttft_s: float | None = None
    message: str = ""
    status: int | None = None
    retry_after_s: float | None = None
    parsed: bool = True

    @property
    def ok(self) -> bool:
        """Whether the model finished its answer."""
        return self.kind is OutcomeKind.OK

    @property
    def retryable(self) -> bool:
        """Whether asking again may end better."""
        return self.kind in RETRYABLE
