"""The command line of one SGLang server: a pure function of version, model, plan and settings.

Flags are named as each version names them. Sources: the releases' `server_args.py`, and recorded starts of 0.5.11 and
0.5.17 on an H200. What the user adds (`serving.extra_args`) comes last and replaces what stands before it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tasks.provisioning.model_config import Model
from tasks.provisioning.pools import parse_version
from tasks.provisioning.settings import MtpSettings

RENAMED_MAMBA_STRATEGY = (0, 5, 14)
"""--mamba-scheduler-strategy became --mamba-radix-cache-strategy (the old name is gone from 0.5.20)."""
RENAMED_GRAPH_SIZE = (0, 5, 15)
"""--cuda-graph-max-bs became --cuda-graph-max-bs-decode, --disable-piecewise-cuda-graph --disable-prefill-cuda-graph:
0.5.15 and 0.5.17 know both (the old ones as deprecated aliases), 0.5.11 only the old, 0.5.23 only the new."""
SPEC_V2_DEFAULT = (0, 5, 14)
"""Before this release SGLANG_ENABLE_SPEC_V2 chooses the overlapping speculative worker; later it is ignored."""
IMAGE_TRANSPORT = (0, 5, 17)
"""From here on 1 GiB of GPU memory is reserved for image features unless they are told to stay on the CPU."""

PARSERS = {
    "qwen3_5": ("qwen3", "qwen3_coder"),
    "qwen3_5_moe": ("qwen3", "qwen3_coder"),
    "qwen3_next": ("qwen3", "qwen3_coder"),
    "qwen3": ("qwen3", "qwen25"),
    "qwen3_moe": ("qwen3", "qwen25"),
    "deepseek_v3": ("deepseek-r1", "deepseekv3"),
    "glm4_moe": ("glm45", "glm45"),
    "gpt_oss": ("gpt-oss", "gpt-oss"),
}
"""Reasoning and tool-call parser by config.json's model_type; others need --reasoning-parser in serving.extra_args."""


@dataclass(frozen=True, slots=True)
class StartConfig:
    """One attempt's knobs: what the ladder turns. `mtp` None: no speculation. `graph_size` None: as max_running."""

    max_running: int
    mem_fraction: float
    mtp: MtpSettings | None = None
    radix: bool = False
    hierarchical: bool = False
    max_states: int | None = None
    graph_size: int | None = None
    prefill_graph: bool = True
    state_dtype: str | None = None
    quantization: str | None = None
    tp: int = 1
    dropped: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the run's record."""
        mtp = self.mtp.model_dump(mode="json") if self.mtp else None
        return {**asdict(replace(self, mtp=None)), "mtp": mtp, "dropped": list(self.dropped)}


@dataclass(frozen=True, slots=True)
class Place:
    """Where one server runs and what it serves."""

    model_path: str
    served_name: str
    port: int
    api_key: str = field(default="", repr=False)
    host: str = "127.0.0.1"
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    context_tokens: int | None = None


def build(version: str, model: Model, place: Place, config: StartConfig, extra: Sequence[str] = ()) -> list[str]:
    """The arguments after `python -m sglang.launch_server`. `extra` replaces equal flags and comes last."""
    numbers = parse_version(version)
    flags: list[tuple[str, ...]] = [
        ("--model-path", place.model_path),
        ("--served-model-name", place.served_name),
        ("--host", place.host),
        ("--port", str(place.port)),
        *_optional(place, config),
        ("--enable-metrics",),
        ("--max-running-requests", str(config.max_running)),
        ("--mem-fraction-static", f"{config.mem_fraction:.3f}"),
        *_parsers(model),
        *_cache(numbers, model, config),
        *_graphs(numbers, model, config),
        *_speculation(config.mtp),
    ]
    given = {word.split("=", 1)[0] for word in extra if word.startswith("--")}
    kept = [flag for flag in flags if flag[0] not in given and flag[0] not in config.dropped]
    return [*(word for flag in kept for word in flag), *extra]


def environment(version: str, config: StartConfig, simulate_accept_length: float | None = None) -> dict[str, str]:
    """Variables of the server process. `simulate_accept_length` comes only from a GPU test, never from settings."""
    env: dict[str, str] = {}
    if config.mtp and parse_version(version) < SPEC_V2_DEFAULT:
        env["SGLANG_ENABLE_SPEC_V2"] = "1"
    if simulate_accept_length is not None:
        env["SGLANG_SIMULATE_ACC_LEN"] = str(simulate_accept_length)
    return env


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """The last value of `flag` in an argument list, in either form (`--a b`, `--a=b`)."""
    found = None
    for position, word in enumerate(arguments):
        if word == flag and position + 1 < len(arguments):
            found = arguments[position + 1]
        elif word.startswith(f"{flag}="):
            found = word.split("=", 1)[1]
    return found


def _optional(place: Place, config: StartConfig) -> list[tuple[str, ...]]:
    pairs = (
        ("--api-key", place.api_key),
        ("--revision", place.revision),
        ("--tokenizer-path", place.tokenizer),
        ("--chat-template", place.chat_template),
        ("--context-length", place.context_tokens),
        ("--quantization", config.quantization),
        ("--mamba-ssm-dtype", config.state_dtype),
        ("--tp-size", config.tp if config.tp > 1 else None),
    )
    return [(flag, str(value)) for flag, value in pairs if value]


def _parsers(model: Model) -> list[tuple[str, ...]]:
    if model.model_type not in PARSERS:
        return []
    reasoning, tools = PARSERS[model.model_type]
    return [("--reasoning-parser", reasoning), ("--tool-call-parser", tools)]


def _cache(numbers: tuple[int, ...], model: Model, config: StartConfig) -> list[tuple[str, ...]]:
    """Radix cache off for unique prompts: most recorded defects are in its state tracking. With it, MTP on a hybrid
    model needs extra_buffer (0.5.11 refuses to start otherwise, and refuses extra_buffer without it)."""
    if not config.radix and not config.hierarchical:
        return [("--disable-radix-cache",)]
    flags: list[tuple[str, ...]] = []
    if model.linear_layers and config.mtp:
        name = "radix-cache" if numbers >= RENAMED_MAMBA_STRATEGY else "scheduler"
        flags.append((f"--mamba-{name}-strategy", "extra_buffer"))
    if model.linear_layers and config.max_states:
        flags.append(("--max-mamba-cache-size", str(config.max_states)))
    if config.hierarchical:
        # The kernel transfer changes the decode backend to one that cannot verify drafts (it crashed with MTP).
        flags += [("--enable-hierarchical-cache",), ("--hicache-io-backend", "direct")]
    return flags


def _graphs(numbers: tuple[int, ...], model: Model, config: StartConfig) -> list[tuple[str, ...]]:
    newer = numbers >= RENAMED_GRAPH_SIZE
    size = config.graph_size or config.max_running
    flags: list[tuple[str, ...]] = [("--cuda-graph-max-bs-decode" if newer else "--cuda-graph-max-bs", str(size))]
    if not config.prefill_graph:
        flags.append(("--disable-prefill-cuda-graph" if newer else "--disable-piecewise-cuda-graph",))
    if model.vision and numbers >= IMAGE_TRANSPORT:
        flags.append(("--mm-feature-transport", "cpu"))
    return flags


def _speculation(mtp: MtpSettings | None) -> list[tuple[str, ...]]:
    """EAGLE on the checkpoint's own MTP head (NEXTN is an alias of it); the draft path defaults to the target."""
    if mtp is None:
        return []
    return [
        ("--speculative-algorithm", "EAGLE"),
        ("--speculative-num-steps", str(mtp.steps)),
        ("--speculative-eagle-topk", str(mtp.topk)),
        ("--speculative-num-draft-tokens", str(mtp.draft_tokens)),
    ]
