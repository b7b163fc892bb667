"""How prompts become answers."""

from typing import Literal

from pydantic import Field

from tasks.settings import Mode, Settings, Share


class BreakerSettings(Settings):
    """Sliding-window breaker over answers' quality and failures."""

    mode: Mode = Field("enforce", title="Breaker", description="Stop the run, or only report.")
    window: int = Field(500, ge=10, title="Window", description="Most recent answers looked at.")
    min_answers: int = Field(100, ge=1, title="Least answers", description="Before it may trip.")
    max_bad_share: Share = Field(0.2, title="Most bad", description="Share of rejected or failed answers.")


class GenerationSettings(Settings):
    """The engine."""

    chunk_rows: int = Field(
        5000, ge=1, title="Chunk", description="Prompts a chunk; raised to keep 180 chunks at most."
    )
    open_chunks: int = Field(3, ge=1, title="Open chunks", description="Being generated, tokenized or uploaded.")
    max_attempts: int = Field(4, ge=1, title="Attempts", description="Before a prompt is failed for good.")
    on_length: Literal["reject", "keep_prefix", "retry_larger"] = Field(
        "reject", title="Cut answers", description="What finish_reason=length means."
    )
    retry_larger_factor: float = Field(2.0, gt=1, title="Larger by", description="Of the output limit on that retry.")
    min_tok_s: float = Field(5.0, gt=0, title="Slowest rate", description="Tokens/s a request; sets the deadline.")
    ramp_s: float = Field(10.0, ge=0, title="Ramp", description="Seconds from the first request to the full limit.")
    retry_failed: bool = Field(False, title="Retry failed", description="Run terminal failures again.")
    regenerate_ids: tuple[str, ...] = Field((), title="Force ids", description="Answer these again though published.")
    regenerate_reasons: tuple[str, ...] = Field((), title="Force reasons", description="Likewise, by reason.")
    client: Literal["auto", "openai", "thin"] = Field("auto", title="Client", description="HTTP path of requests.")
    turn_policy: Literal["every", "last"] = Field("every", title="Turns", description="Assistant turns to regenerate.")
    drop_repetition: bool = Field(True, title="Reject loops", description="Answers that repeat themselves.")
    retry_base_s: float = Field(0.5, ge=0, title="First wait", description="Seconds; doubles per attempt, with jitter.")
    retry_most_s: float = Field(30.0, ge=0, title="Longest wait", description="Seconds between two attempts.")
    fsync_s: float = Field(0.5, gt=0, le=1.0, title="Durable within", description="Seconds an answer may be at risk.")
    sample_s: float = Field(2.0, gt=0, title="Look every", description="Seconds between looks at a server's counters.")
    probe_s: float = Field(3.0, gt=0, title="Probe every", description="Seconds between probes of an ejected server.")
    stall_s: float = Field(
        180.0,
        gt=0,
        title="Stalled after",
        description="Seconds without a token or heartbeat before a server is ejected (kernels may compile for 110 s).",
    )
    no_server_s: float = Field(
        900.0, gt=0, title="Wait for servers", description="Seconds without any live server before the run fails."
    )
    breaker: BreakerSettings = Field(default_factory=BreakerSettings, title="Breaker", description="Quality breaker.")
