"""The typed values that pass between stages. Rows never pass through Prefect; these small records do."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant", "tool"]
GateMode = Literal["enforce", "monitor"]


@dataclass(frozen=True, slots=True)
class Message:
    """One canonical turn. Reasoning lives in its own field; `tool_calls` is JSON text (OpenAI's list form)."""

    role: Role
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: str | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """All six fields, as the Parquet struct has them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to regenerate.

    `messages` ends with a user or tool turn; assistant turns inside are placeholders whose text is empty and
    whose recorded `tool_calls` are kept, so that recorded tool results can be spliced in while calls match.
    """

    prompt_id: str
    messages: tuple[Message, ...]
    tools: str | None = None
    sample_index: int = 0
    source: str = ""
    row: int = -1
    regenerate_reason: str | None = None
    old_output_tokens: int | None = None


class Level(StrEnum):
    """How serious a verdict is."""

    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Expectation:
    """One checked statement, with the evidence a person needs to believe it."""

    name: str
    passed: bool
    message: str
    level: Level = Level.CRITICAL
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GateReport:
    """What a gate saw. `verdict` is the room's own code (HEALTHY, ON_AND_EFFECTIVE, PASSED…)."""

    gate: str
    verdict: str
    level: Level
    mode: GateMode
    summary: str
    expectations: tuple[Expectation, ...] = ()
    next_steps: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stops(self) -> bool:
        """Whether the run must not go on."""
        return self.mode == "enforce" and self.level is Level.CRITICAL

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form for run records, artifacts and manifests."""
        return {**asdict(self), "details": dict(self.details), "stops": self.stops}


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """Where validation left its files, and its sums (rows = kept + rejected + duplicates, proven by id)."""

    prompts_path: str
    rejected_path: str
    rows: int
    kept: int
    rejected: int
    duplicates: int
    reasons: Mapping[str, int]
    regenerate_reasons: Mapping[str, int]
    report: GateReport


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server was found to understand at start; request bodies carry only these fields."""

    return_token_ids: bool = False
    generate_endpoint: bool = False
    chat_template_kwargs: bool = False
    separate_reasoning: bool = False
    abort: bool = False
    loads: bool = False
    metrics: bool = False
    logprob_ids: bool = False


@dataclass(frozen=True, slots=True)
class Server:
    """One running inference server. `base_url` has no trailing `/v1`."""

    name: str
    base_url: str
    model: str
    engine: Literal["sglang", "llama.cpp", "openai"] = "openai"
    version: str = ""
    api_key: str = field(default="", repr=False)
    capabilities: Capabilities = Capabilities()
    max_running_requests: int | None = None
    context_tokens: int | None = None
    gpu_uuids: tuple[str, ...] = ()
    log_path: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    simulated_acceptance: bool = False


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU of this node as its driver reports it. Bytes; `free_bytes` is what no process holds right now."""

    index: int
    uuid: str
    total_bytes: int
    free_bytes: int
    name: str = ""


class ServerEvents(Protocol):
    """What the supervisor tells whoever sends requests."""

    def server_down(self, name: str, reason: str) -> None:
        """Stop sending to `name`; requeue what it held. Callable from any thread."""

    def server_up(self, name: str) -> None:
        """`name` answers again. Callable from any thread."""


@dataclass(frozen=True, slots=True)
class ServiceSample:
    """One reading of one server's own counters. None where the server does not tell."""

    time_s: float
    server: str
    running: int | None = None
    queued: int | None = None
    kv_usage: float | None = None
    generated_tokens_total: float | None = None
    prompt_tokens_total: float | None = None
    retracted_total: float | None = None
    accept_length: float | None = None
    gen_throughput_tok_s: float | None = None
    heartbeat_age_s: float | None = None
    cuda_graph: bool | None = None
    alive: bool = True


@dataclass(frozen=True, slots=True)
class PowerSample:
    """One reading of one GPU. Watts; fractions in 0..1; clocks in MHz; counters as the driver counts them."""

    time_s: float
    gpu_uuid: str
    power_average_w: float | None = None
    power_instant_w: float | None = None
    enforced_limit_w: float | None = None
    default_limit_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    utilization: float | None = None
    memory_used_bytes: int | None = None
    event_reasons: int | None = None
    throttle_sw_power_ns: float | None = None
    throttle_sw_thermal_ns: float | None = None
    throttle_hw_thermal_ns: float | None = None
    throttle_hw_brake_ns: float | None = None


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """One steady window at one concurrency, as calibration sees it. `concurrency` is requests in flight a server."""

    server: str
    concurrency: int
    duration_s: float
    output_tokens: float
    mean_running: float
    mean_queued: float = 0.0
    kv_usage: float | None = None
    retractions: float = 0.0
    accept_length: float | None = None
    power_w: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    starved: bool = False

    @property
    def tok_s(self) -> float:
        """Output token throughput of this server, tokens per second."""
        return self.output_tokens / self.duration_s if self.duration_s > 0 else 0.0


class LoadDriver(Protocol):
    """What calibration drives: the generation engine, or anything that keeps C requests in flight."""

    def servers(self) -> list[str]:
        """Names of the live servers."""

    def set_limit(self, server: str, limit: int) -> None:
        """Requests in flight wanted at `server` from now on."""

    async def window(self, server: str, min_s: float, max_s: float) -> LoadWindow:
        """Wait for a steady state at the present limit, then measure one window."""


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """Chosen requests in flight per server, and every window that was measured on the way."""

    limits: Mapping[str, int]
    tok_s: float
    windows: tuple[LoadWindow, ...]
    key: str
    cached: bool = False
    stopped_because: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Median and 90 % interval of what remains. Seconds, tokens, kWh and currency units."""

    remaining_prompts: int
    tokens: tuple[float, float, float]
    time_s: tuple[float, float, float]
    tok_s: float
    energy_kwh: tuple[float, float, float] | None = None
    cost: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The run so far; `eta_s` is (median, low, high) or None while nothing is known."""

    total: int
    done: int
    failed: int
    in_flight: int
    output_tokens: int
    elapsed_s: float
    tok_s: float
    accept_length: float | None = None
    reject_rate: float = 0.0
    power_w: float | None = None
    j_per_token: float | None = None
    eta_s: tuple[float, float, float] | None = None
    servers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A finished chunk: small enough to pass through Prefect."""

    index: int
    directory: str
    prompts: int
    done: int
    failed: int
    output_tokens: int
    completions_path: str
    failed_reasons: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A tokenized chunk."""

    index: int
    tokens_path: str
    rows: int
    rejected: int
    supervised_tokens: int
    exact_rows: int
    reasons: Mapping[str, int] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One published file. `key` is relative to the data set's root."""

    key: str
    bytes: int
    sha256: str
    rows: int | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class PublishedChunk:
    """The files of one chunk, re-read from the store after upload."""

    index: int
    files: tuple[FileEntry, ...]
    bytes_sent: int
