"""From an HTTP answer to a typed outcome. Pure: tested on recorded answers."""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from tasks.client.outcomes import ChatOutcome, IdsSource, OutcomeKind

# Wordings of SGLang, llama.cpp, vLLM and OpenAI for "does not fit the context window".
_OVERFLOW = re.compile(
    r"context[ _-]?(length|window|size)|maximum context|longer than the model|exceed_context_size|"
    r"maximum allowed length|max_model_len|too many tokens|maximum input length",
    re.IGNORECASE,
)
_LATER = frozenset({408, 409, 425, 429, 503})
_KINDS = {
    "stop": OutcomeKind.OK,
    "tool_calls": OutcomeKind.OK,
    "function_call": OutcomeKind.OK,
    "length": OutcomeKind.CUT,
    "abort": OutcomeKind.ABORTED,
}


def read_answer(
    status: int, payload: bytes, latency_s: float, *, generate: bool = False, retry_after: str | None = None
) -> ChatOutcome:
    """Judge one complete HTTP answer; never raises."""
    if status != 200:
        return _read_error(status, payload, latency_s, retry_after)
    try:
        body = orjson.loads(payload)
        if generate:
            return _read_generate(body[0] if isinstance(body, list) else body, latency_s)
        return _read_chat(body, latency_s)
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        start = payload[:120].decode("utf-8", "replace")
        text = f"HTTP 200 whose body is not an answer ({type(error).__name__}: {error}); it begins {start!r}"
        return ChatOutcome(OutcomeKind.MALFORMED, message=text, latency_s=latency_s, status=status)


def _read_error(status: int, payload: bytes, latency_s: float, retry_after: str | None) -> ChatOutcome:
    text = error_text(payload)
    if status in _LATER:
        kind = OutcomeKind.RETRY_LATER
    elif status == 413 or (status in (400, 422, 500) and _OVERFLOW.search(text)):
        kind = OutcomeKind.OVERFLOW
    elif status >= 500:
        kind = OutcomeKind.SERVER_ERROR
    else:
        kind = OutcomeKind.BAD_REQUEST
    wait = _seconds(retry_after)
    return ChatOutcome(kind, message=f"HTTP {status}: {text}", latency_s=latency_s, status=status, retry_after_s=wait)


def error_text(payload: bytes) -> str:
    """The message inside an error body, in whichever of the known shapes it has; at most 500 characters."""
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return payload[:500].decode("utf-8", "replace").strip()
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        kind = str(error.get("type") or "")
        message = str(error.get("message") or error.get("detail") or error)
        return f"{message} ({kind})"[:500] if kind else message[:500]
    return str(error)[:500]


def _seconds(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None


def _read_chat(body: dict[str, Any], latency_s: float) -> ChatOutcome:
    choice = body["choices"][0]
    message = choice["message"]
    usage = body.get("usage") or {}
    meta = choice.get("meta_info") or {}
    token_ids, source = _chat_ids(body, choice)
    finish = choice.get("finish_reason")
    calls = message.get("tool_calls")
    return ChatOutcome(
        _KINDS.get(finish, OutcomeKind.MALFORMED),
        content=_text(message.get("content")) or "",
        reasoning_content=_text(message.get("reasoning_content", message.get("reasoning"))),
        tool_calls=orjson.dumps(calls).decode() if calls else None,
        finish_reason=finish,
        prompt_token_ids=choice.get("prompt_token_ids") or body.get("prompt_token_ids"),
        token_ids=token_ids,
        ids_source=source,
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        **_speculation(meta, body.get("timings") or {}),
        latency_s=latency_s,
        message="" if finish in _KINDS else f"unknown finish_reason {finish!r}",
        status=200,
    )


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"text expected, found {type(value).__name__}")


def _chat_ids(body: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[list[int] | None, IdsSource]:
    if choice.get("token_ids") is not None:
        return choice["token_ids"], "server"
    verbose = body.get("__verbose") or {}
    if verbose.get("tokens"):
        return verbose["tokens"], "server"
    logprobs = (choice.get("logprobs") or {}).get("content")
    if logprobs and "id" in logprobs[0]:
        return [entry["id"] for entry in logprobs], "logprobs"
    return None, "none"


def _speculation(meta: Mapping[str, Any], timings: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's meta_info, or llama.cpp's timings (draft_n proposed, draft_n_accepted)."""
    if meta.get("spec_verify_ct"):
        verify = int(meta["spec_verify_ct"])
        length = meta.get("spec_accept_length") or meta.get("completion_tokens", 0) / verify
        return {"accept_length": float(length), "verify_ct": verify}
    accepted, predicted = timings.get("draft_n_accepted"), timings.get("predicted_n")
    if accepted is not None and predicted:
        steps = max(1, predicted - accepted)  # each verification step yields one token beside the accepted drafts
        return {"accept_length": predicted / steps, "verify_ct": steps}
    return {"accept_length": None, "verify_ct": None}


def _read_generate(body: dict[str, Any], latency_s: float) -> ChatOutcome:
    meta = body["meta_info"]
    reason = meta.get("finish_reason")
    finish = reason.get("type") if isinstance(reason, dict) else reason
    return ChatOutcome(
        _KINDS.get(str(finish), OutcomeKind.MALFORMED),
        content=_text(body.get("text")) or "",
        finish_reason=finish,
        token_ids=body.get("output_ids"),
        ids_source="server" if body.get("output_ids") is not None else "none",
        prompt_tokens=meta.get("prompt_tokens"),
        completion_tokens=meta.get("completion_tokens"),
        **_speculation(meta, {}),
        latency_s=latency_s,
        message="" if finish in _KINDS else f"unknown finish_reason {finish!r}",
        status=200,
        parsed=False,
    )
