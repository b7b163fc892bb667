"""The columns that validation writes. Every schema is declared: no null-typed column, no inferred type.

Text of messages is `large_string`: a row group may pass the 2 GiB that 32-bit offsets reach.
"""

import pyarrow as pa

MESSAGE = pa.struct(
    [
        pa.field("role", pa.string()),
        pa.field("content", pa.large_string()),
        pa.field("reasoning_content", pa.large_string()),
        pa.field("tool_calls", pa.large_string()),
        pa.field("tool_call_id", pa.string()),
        pa.field("name", pa.string()),
    ]
)
"""The six fields of `tasks.records.Message`, in its order."""

PROMPTS = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("messages", pa.list_(MESSAGE), nullable=False),
        pa.field("tools", pa.large_string()),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("regenerate_reason", pa.string()),
        pa.field("old_output_tokens", pa.int32()),
    ]
)
"""prompts.parquet, sorted by prompt_id: hash order, so any prefix is a random sample."""

REJECTED = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string()),
        pa.field("duplicate_of", pa.string()),
        pa.field("prompt_id", pa.string()),
    ]
)
"""rejected.parquet: rejects and duplicates. `row` counts from 0 (the line number of JSONL is row + 1)."""

KEPT_TOKENS = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("n_tokens", pa.int32(), nullable=False),
        pa.field("n_supervised", pa.int32(), nullable=False),
        pa.field("n_scaffold", pa.int32(), nullable=False),
        pa.field("n_content", pa.int32(), nullable=False),
    ]
)
"""kept_tokens.parquet: tokenized rows that may be trained on, where one validates for training."""
