"""The explicit schemas of what tokenization writes. Offsets are 64 bit: a column may pass 2 GiB."""

import pyarrow as pa

MASK_CONVENTION = "token_aligned_unshifted"
"""mask[i] == 1 exactly when the target sampled token i; a trainer shifts, this file does not."""

IDS = pa.large_list(pa.field("item", pa.int32(), nullable=False))
MASK = pa.large_list(pa.field("item", pa.int8(), nullable=False))

TOKENS = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("input_ids", IDS, nullable=False),
        pa.field("loss_mask", MASK, nullable=False),
        pa.field("n_supervised", pa.int32(), nullable=False),
        pa.field("n_scaffold", pa.int32(), nullable=False),
        pa.field("n_content", pa.int32(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("ids_exact", pa.bool_(), nullable=False),
        pa.field("token_source", pa.string(), nullable=False),
        pa.field("mask_method", pa.string(), nullable=False),
        pa.field("retokenized_difference", pa.int32()),
    ]
)
"""`token_source` is "server" or "retokenized"; `mask_method` is "server_ids", "template_offsets" or
"composed_offsets"; `retokenized_difference` = our sampled tokens − the server's completion_tokens, where text was used.
"""

REJECTED = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)

PACKED = pa.schema(
    [
        pa.field("input_ids", IDS, nullable=False),
        pa.field("loss_mask", MASK, nullable=False),
        pa.field("lengths", pa.large_list(pa.int32()), nullable=False),
        pa.field("prompt_ids", pa.large_list(pa.string()), nullable=False),
    ]
)
"""Whole rows laid end to end; `lengths` are the rows' own, for block-diagonal attention or position ids."""
