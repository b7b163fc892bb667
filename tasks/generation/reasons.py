"""Why an answer or a prompt was not accepted. Each code has one line of documentation (`describe`)."""

from enum import StrEnum


class Reason(StrEnum):
    """Reason codes of failed.parquet, of the breaker's evidence and of the attempt ledger."""

    CONTEXT_OVERFLOW = "CONTEXT_OVERFLOW"
    BAD_REQUEST = "BAD_REQUEST"
    TIMEOUT = "TIMEOUT"
    SERVER_ERROR = "SERVER_ERROR"
    CONNECTION = "CONNECTION"
    RETRY_LATER = "RETRY_LATER"
    ABORTED = "ABORTED"
    MALFORMED = "MALFORMED"
    TRUNCATED_BY_LENGTH = "TRUNCATED_BY_LENGTH"
    TRUNCATED_IN_REASONING = "TRUNCATED_IN_REASONING"
    EMPTY_ANSWER = "EMPTY_ANSWER"
    MISSING_REASONING = "MISSING_REASONING"
    THINKING_MODE_MISMATCH = "THINKING_MODE_MISMATCH"
    UNCLOSED_THINK = "UNCLOSED_THINK"
    ANSWER_IN_REASONING = "ANSWER_IN_REASONING"
    DUPLICATE_THINK_BLOCK = "DUPLICATE_THINK_BLOCK"
    CONTROL_TOKEN_IN_CONTENT = "CONTROL_TOKEN_IN_CONTENT"
    TOOL_CALL_AS_TEXT = "TOOL_CALL_AS_TEXT"
    BAD_TOOL_CALL = "BAD_TOOL_CALL"
    DEGENERATE_REPETITION = "DEGENERATE_REPETITION"
    SINGLE_TOKEN_RUN = "SINGLE_TOKEN_RUN"
    USAGE_MISMATCH = "USAGE_MISMATCH"
    IDS_MISMATCH = "IDS_MISMATCH"
    TOOL_CALLS_DIFFER = "TOOL_CALLS_DIFFER"
    UNEXPECTED_TOOL_CALL = "UNEXPECTED_TOOL_CALL"
    BAD_PROMPT = "BAD_PROMPT"


_DOCS = {
    Reason.CONTEXT_OVERFLOW: "the prompt leaves no room for an answer in the server's context window",
    Reason.BAD_REQUEST: "the server refused the request for good (4xx)",
    Reason.TIMEOUT: "no answer within the deadline of max_tokens at the slowest acceptable rate",
    Reason.SERVER_ERROR: "the server answered 5xx",
    Reason.CONNECTION: "refused, reset, or the answer's body ended early",
    Reason.RETRY_LATER: "the server was busy (408, 429, 503) more often than attempts allow",
    Reason.ABORTED: "HTTP 200 with finish_reason abort that this run did not ask for",
    Reason.MALFORMED: "HTTP 200 whose body is not an answer",
    Reason.TRUNCATED_BY_LENGTH: "finish_reason length after the thinking was closed",
    Reason.TRUNCATED_IN_REASONING: "finish_reason length before the thinking was closed",
    Reason.EMPTY_ANSWER: "no text and no tool call",
    Reason.MISSING_REASONING: "thinking was asked for and none came (white space counts as none)",
    Reason.THINKING_MODE_MISMATCH: "thinking was switched off and some came",
    Reason.UNCLOSED_THINK: "the model stopped without closing its think block",
    Reason.ANSWER_IN_REASONING: "all text is in the reasoning, the answer is empty, and no token ids tell more",
    Reason.DUPLICATE_THINK_BLOCK: "more than one think block in one answer",
    Reason.CONTROL_TOKEN_IN_CONTENT: "a control token of the target stands in the text",
    Reason.TOOL_CALL_AS_TEXT: "a tool call was left in the text instead of being parsed",
    Reason.BAD_TOOL_CALL: "finish_reason tool_calls without calls, or calls whose arguments are not JSON",
    Reason.DEGENERATE_REPETITION: "the answer repeats itself",
    Reason.SINGLE_TOKEN_RUN: "a long run of one token (token 0: NaN logits)",
    Reason.USAGE_MISMATCH: "token ids and usage do not add up",
    Reason.IDS_MISMATCH: "the token ids do not decode to the text",
    Reason.TOOL_CALLS_DIFFER: "the regenerated calls differ from the recorded ones; the conversation is cut there",
    Reason.UNEXPECTED_TOOL_CALL: "a call for which no result was recorded; the conversation is cut there",
    Reason.BAD_PROMPT: "the prompt's tools or calls are not valid JSON, or its template refused it",
}


def describe(reason: Reason | str) -> str:
    """One line of documentation."""
    return _DOCS[Reason(reason)]
