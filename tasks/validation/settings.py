"""What is read, and what a usable prompt is."""

from typing import Literal

from pydantic import Field

from tasks.settings import Mode, Settings, Share


class SourceSettings(Settings):
    """Prompts and old responses to regenerate."""

    paths: tuple[str, ...] = Field(
        title="Sources", description="Files, folders, globs, s3:// URLs or Hugging Face ids (hf://org/name)."
    )
    split: str = Field("train", title="Split", description="Of Hugging Face data sets.")
    limit: int | None = Field(None, ge=1, title="Limit", description="Read at most this many rows.")
    gate: Mode = Field("enforce", title="Gate", description="Stop when too much is rejected, or only report it.")
    max_reject_share: Share = Field(0.5, title="Most rejects", description="Share of rows that may be rejected.")
    min_content_tokens: int = Field(
        8, ge=0, title="Least content tokens", description="Supervised minus markers, separators and end of turn."
    )
    max_empty_share: Share = Field(
        0.05, title="Most empty samples", description="Share of old samples below the floor before the verdict fails."
    )
    control_tokens: str = Field(
        "reject", pattern="^(reject|encode)$", title="Control tokens in text", description="reject or encode as text."
    )
    max_line_bytes: int = Field(64 << 20, ge=1024, title="Longest line", description="Bytes of one JSONL line.")
    duplicates: Literal["auto", "prompt", "row"] = Field(
        "auto", title="Duplicates", description="What is compared; auto: the row where one trains, else the prompt."
    )
    near_duplicates: bool = Field(False, title="Near duplicates", description="MinHash over word shingles.")
    near_duplicate_threshold: Share = Field(0.85, title="Similarity", description="Jaccard estimate of a duplicate.")
    decontaminate: tuple[str, ...] = Field(
        (), title="Benchmarks", description="Files whose prompts must not be in the training data."
    )
    decontaminate_ngram: int = Field(13, ge=3, title="n-gram", description="Words that must overlap.")
    workers: int | None = Field(None, ge=1, title="Processes", description="Empty: one a core, at most 8.")
    s3_endpoint_url: str | None = Field(None, title="S3 endpoint", description="For s3:// sources that are not AWS.")
