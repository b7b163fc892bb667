"""Why an answer did not become a training row. Each member's comment is its documentation."""

from enum import StrEnum


class Reason(StrEnum):
    """Reject codes of tokens_rejected.parquet."""

    RENDER_MISMATCH = "RENDER_MISMATCH"
    """The prompt ids that the server reported are not those of the target's own template and tokenizer."""
    TEMPLATE_REFUSED = "TEMPLATE_REFUSED"
    """The chat template raised an error for this conversation."""
    ANSWER_NOT_RENDERED = "ANSWER_NOT_RENDERED"
    """Neither the template nor the family description can write this answer after its prompt."""
    DUPLICATE_THINK_BLOCK = "DUPLICATE_THINK_BLOCK"
    """Think markers remain in the answer's text after its one think block was taken out."""
    EMPTY_ANSWER = "EMPTY_ANSWER"
    """The turn has neither text, reasoning nor tool calls, and no ids."""
    STOP_TOKEN_INSIDE = "STOP_TOKEN_INSIDE"
    """An end-of-sequence id stands before the end of the sampled ids."""
    ID_OUT_OF_RANGE = "ID_OUT_OF_RANGE"
    """A token id is negative or not below the target's vocabulary size."""
    TOO_LONG = "TOO_LONG"
    """The row is longer than `max_length` and the policy is to reject."""
    NO_SUPERVISED_TOKENS_AFTER_TRUNCATION = "NO_SUPERVISED_TOKENS_AFTER_TRUNCATION"
    """Cutting the row to `max_length` removed its supervision, or left less content than the minimum."""
    TOO_FEW_SUPERVISED_TOKENS = "TOO_FEW_SUPERVISED_TOKENS"
    """Fewer content tokens (supervised minus markers, separators, end of turn) than `min_content_tokens`."""
    BAD_ROW = "BAD_ROW"
    """The completion's messages and turns do not fit together."""
