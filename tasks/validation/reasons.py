"""Why a row is rejected, or why its old response must be regenerated. One code, one line of documentation."""

from enum import StrEnum


class Reason(StrEnum):
    """Reason codes. `Reason.X.explanation` is the one line that people read."""

    explanation: str

    def __new__(cls, code: str, explanation: str) -> "Reason":
        """A member is its code; the explanation rides along."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.explanation = explanation
        return member

    # The line or the row as such.
    INVALID_JSON = "INVALID_JSON", "The line is not strict JSON (NaN and Infinity are not JSON either)."
    INVALID_UTF8 = "INVALID_UTF8", "The bytes are not valid UTF-8."
    LONE_SURROGATE = "LONE_SURROGATE", "A \\uD800–\\uDFFF escape without its other half: no text can hold it."
    TORN_LINE = "TORN_LINE", "The last line has no newline and is not complete JSON: the writer was cut off."
    LINE_TOO_LONG = "LINE_TOO_LONG", "The line is longer than source.max_line_bytes."
    NOT_AN_OBJECT = "NOT_AN_OBJECT", "The row is valid JSON but not an object."
    NO_CONVERSATION = "NO_CONVERSATION", "None of messages, conversations, turns, prompt or input_ids is there."
    UNREADABLE_ROW = "UNREADABLE_ROW", "The row could not be read for a reason that has no code of its own."

    # Messages.
    BAD_MESSAGE = "BAD_MESSAGE", "A message is not an object, or the list of messages is not a list."
    NO_MESSAGES = "NO_MESSAGES", "The list of messages is empty."
    UNKNOWN_ROLE = "UNKNOWN_ROLE", "A role that is none of system, user, assistant, tool or a known other name of them."
    BAD_CONTENT_TYPE = "BAD_CONTENT_TYPE", "Content that is neither text nor a list of text parts."
    UNSUPPORTED_CONTENT_PART = "UNSUPPORTED_CONTENT_PART", "An image, audio or other part that is not text."
    BAD_TOOL_CALL = "BAD_TOOL_CALL", "tool_calls is not a list of {function: {name, arguments}}."
    BAD_TOOLS = "BAD_TOOLS", "tools is not a list, or not the JSON text of one."
    NO_USER_TURN = "NO_USER_TURN", "No user turn: most chat templates refuse to render it."
    EMPTY_USER_TURN = "EMPTY_USER_TURN", "A user turn without text."
    STARTS_WITH_ASSISTANT = "STARTS_WITH_ASSISTANT", "The first turn after the system prompt is not the user's."
    BAD_ROLE_ORDER = (
        "BAD_ROLE_ORDER",
        "Two users or two assistants in a row, a late system turn, or an orphaned tool turn.",
    )
    CONTROL_TOKEN_IN_CONTENT = "CONTROL_TOKEN_IN_CONTENT", "Text holds a control token of the target's tokenizer."

    # Old responses.
    MUST_END_WITH_ASSISTANT = "MUST_END_WITH_ASSISTANT", "Nothing to train on: the last turn is not the assistant's."
    EMPTY_ASSISTANT = "EMPTY_ASSISTANT", "An assistant turn without text and without tool calls."
    DUPLICATE_THINK_BLOCK = "DUPLICATE_THINK_BLOCK", "More than one think block, or two that disagree, in one turn."
    UNCLOSED_THINK_BLOCK = "UNCLOSED_THINK_BLOCK", "A think tag without its partner."
    TOO_FEW_SUPERVISED_TOKENS = (
        "TOO_FEW_SUPERVISED_TOKENS",
        "Fewer content tokens (supervised minus the template's scaffold) than the floor.",
    )

    # Tokenized rows.
    NULL_ROW = "NULL_ROW", "input_ids or the mask is null."
    EMPTY_ROW = "EMPTY_ROW", "input_ids is empty."
    BAD_IDS = "BAD_IDS", "input_ids or the mask holds something that is not an integer."
    LENGTH_MISMATCH = "LENGTH_MISMATCH", "input_ids and the mask differ in length; they are never cut to fit."
    MASK_NOT_BINARY = "MASK_NOT_BINARY", "The loss mask holds a value other than 0 and 1."
    LABELS_DIFFER = "LABELS_DIFFER", "A label is neither −100 nor the token at its own position (shifted labels?)."
    ID_OUT_OF_RANGE = "ID_OUT_OF_RANGE", "A token id is negative or not in the target's vocabulary."
    DOES_NOT_DECODE = "DOES_NOT_DECODE", "The ids do not split into turns at the target's turn headers."

    # Switched on by the user.
    NEAR_DUPLICATE = "NEAR_DUPLICATE", "Nearly the same words as another prompt (MinHash estimate)."
    CONTAMINATED = "CONTAMINATED", "Shares an n-gram with a benchmark that the user named."

    # Duplicates: counted apart from rejects.
    DUPLICATE = "DUPLICATE", "The same canonical content as an earlier row."
    ALREADY_DONE = "ALREADY_DONE", "The prompt's answer is published already."


RESPONSE_REASONS = frozenset(
    {
        Reason.MUST_END_WITH_ASSISTANT,
        Reason.EMPTY_ASSISTANT,
        Reason.DUPLICATE_THINK_BLOCK,
        Reason.UNCLOSED_THINK_BLOCK,
        Reason.TOO_FEW_SUPERVISED_TOKENS,
    }
)
"""Faults of the old response: rejects where one trains, regenerate reasons where one regenerates."""

DUPLICATE_REASONS = frozenset({Reason.DUPLICATE, Reason.NEAR_DUPLICATE, Reason.ALREADY_DONE})
"""Rows that end as duplicates rather than rejects."""


EXPLANATIONS = {reason.value: reason.explanation for reason in Reason}
"""Documentation lines by code, for tables."""


class RowError(Exception):
    """One bad row: caught by the reader, which records it and goes on. Never leaves this room."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
