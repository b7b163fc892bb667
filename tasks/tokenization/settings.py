"""What a training row is."""

from typing import Literal

from pydantic import Field

from tasks.settings import Settings


class TokenizationSettings(Settings):
    """Arrays and masks."""

    max_length: int | None = Field(None, ge=16, title="Longest row", description="Tokens; empty: never cut.")
    on_too_long: Literal["reject", "truncate"] = Field("reject", title="Too long", description="What then happens.")
    min_content_tokens: int = Field(8, ge=0, title="Least content", description="On the final arrays.")
    pack_to: int | None = Field(None, ge=16, title="Pack to", description="Pack rows into sequences of this length.")
    workers: int | None = Field(None, ge=1, title="Processes", description="Empty: one a core, at most 8.")
    mask: Literal["sampled", "answer_only"] = Field("sampled", title="Mask", description="What is supervised.")
