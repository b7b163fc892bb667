"""How servers come to be, and what they must prove before real work."""

from typing import Literal

from pydantic import Field

from tasks.settings import Mode, Settings

PROVEN_SGLANG = "0.5.17"
"""Newest SGLang version that this code was run against on a real GPU; docker/requirements-sglang.txt must agree."""


class MtpSettings(Settings):
    """Multi-token prediction through EAGLE/NEXTN. Draft tokens = steps + 1 when top-k is 1."""

    steps: int = Field(3, ge=1, le=8, title="Draft steps", description="Tokens guessed ahead.")
    topk: int = Field(1, ge=1, title="Top-k", description="Branches; 1 keeps the overlap schedule.")
    draft_tokens: int = Field(4, ge=2, title="Draft tokens", description="Verified per step.")
    gate: Mode = Field("enforce", title="MTP gate", description="Stop when MTP is off or ineffective.")
    min_accept_length: float = Field(
        1.2, ge=1.0, title="Least acceptance length", description="1.0 = nothing accepted."
    )
    parity_canary: bool = Field(False, title="Parity canary", description="Compare greedy answers with and without.")


class ServingSettings(Settings):
    """Where the servers are."""

    mode: Literal["embedded", "attach", "process", "docker"] = Field(
        "process", title="Mode", description="embedded: CPU engine; attach: running servers; process/docker: SGLang."
    )
    urls: tuple[str, ...] = Field((), title="URLs", description="attach: base URLs, or dns://name:port for many.")
    api_key_env: str = Field(
        "REGEN_API_KEY", title="Key variable", description="attach: environment variable that holds the API key."
    )
    sglang_version: str = Field(PROVEN_SGLANG, title="SGLang version", description="Flags are named as it names them.")
    python: str | None = Field(
        None, title="SGLang's Python", description="process: interpreter of the environment that has sglang."
    )
    image: str | None = Field(None, title="Image", description="docker: default lmsysorg/sglang:v<version>.")
    gpus: tuple[int, ...] = Field((), title="GPUs", description="Indices to use; empty: all.")
    tensor_parallel: int | None = Field(None, ge=1, title="TP", description="Empty: smallest that fits.")
    min_servers: int | None = Field(
        None, ge=1, title="Least servers", description="Go on when this many start; empty: every one must."
    )
    slots: int | None = Field(None, ge=1, title="Running requests", description="A server; empty: planned from memory.")
    context_tokens: int | None = Field(None, ge=512, title="Context", description="Prompt and answer; empty: planned.")
    mem_fraction: float | None = Field(None, gt=0, lt=1, title="Memory fraction", description="Empty: planned.")
    mean_tokens: int = Field(4096, ge=1, title="Mean length", description="Tokens a request, for the memory plan.")
    radix_cache: bool = Field(False, title="Radix cache", description="Off for unique prompts.")
    hierarchical_cache: bool = Field(False, title="Hierarchical cache", description="It frees no GPU memory.")
    allow_bf16_state: bool = Field(False, title="Allow bf16 state", description="Changes numerics; last resort.")
    allow_fp8: bool = Field(False, title="Allow FP8", description="Changes the data; last resort.")
    extra_args: tuple[str, ...] = Field((), title="More arguments", description="Passed to the server last; they win.")
    env: dict[str, str] = Field(default_factory=dict, title="Environment", description="Of the server processes.")
    mtp: MtpSettings = Field(default_factory=MtpSettings, title="MTP", description="Speculative decoding.")
    thinking_gate: Mode = Field("enforce", title="Thinking gate", description="Stop when thinking does not work.")
    start_timeout_s: float = Field(1800, gt=0, title="Start timeout", description="Seconds until a server is ready.")
    start_attempts: int = Field(4, ge=1, title="Start attempts", description="Each turns one knob of the ladder.")
    restart_budget: int = Field(10, ge=0, title="Restarts", description="Of one server during the run.")
    hang_timeout_s: float = Field(120, gt=0, title="Hang timeout", description="No progress with requests in flight.")
