"""How SGLang divides GPU memory at start: the formulas of three generations, for one GPU of a tensor-parallel group.

Sources: 0.5.11 `model_runner_kv_cache_mixin.py` L54-135, L180-192, L700-722; 0.5.23 `kv_cache_configurator.py`
L3128-3410. 0.5.17 is neither: its rule was fitted to seven recorded starts on an H200 (weights include the draft and
its passing copies of embedding and head, KV per token does not include the draft's; the budget counts a whole
convolution window for each drafted token, but the windows that are allocated overlap). Versions between are taken as
the older generation that they follow. All in bytes.
"""

from dataclasses import dataclass
from enum import StrEnum

from tasks.provisioning.model_config import Model

GIB = 1 << 30
MAMBA_RATIO = 0.9
"""--mamba-full-memory-ratio: states to KV, its default in every version."""
DEFAULT_RUNNING_WITH_MTP = 48
VISION_FACTOR = 0.9268
"""What the vision tower takes off the default fraction (recorded: 0.9271 without MTP, 0.9266 with)."""


class Generation(StrEnum):
    """Whose formulas hold."""

    V11 = "0.5.11"
    V17 = "0.5.17"
    V23 = "0.5.23"


def parse_version(version: str) -> tuple[int, ...]:
    """`0.5.17.post1` → (0, 5, 17); anything unreadable sorts as newest known."""
    numbers = []
    for part in version.lstrip("v").split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            return (0, 5, 17)
        numbers.append(int(digits))
    return tuple(numbers)


def generation(version: str) -> Generation:
    """The memory formulas that `version` follows."""
    numbers = parse_version(version)
    if numbers < (0, 5, 14):
        return Generation.V11
    return Generation.V17 if numbers < (0, 5, 20) else Generation.V23


@dataclass(frozen=True, slots=True)
class Layout:
    """The knobs that decide how memory is divided. `draft_tokens` 0: no MTP. `max_running` None: SGLang's default."""

    max_running: int | None
    draft_tokens: int = 0
    radix: bool = False
    ssm_bytes: int | None = None
    kv_element_bytes: int = 2
    fp8: bool = False
    tp: int = 1
    max_states: int | None = None


@dataclass(frozen=True, slots=True)
class Pools:
    """What a start with these knobs gives. `free_bytes` is what stays before graphs and activations."""

    ok: bool
    why: str
    requests: int = 0
    states: int = 0
    kv_tokens: int = 0
    state_bytes: int = 0
    intermediate_bytes: int = 0
    kv_bytes: int = 0
    free_bytes: int = 0


def slots_per_request(layout: Layout) -> int:
    """States that one running request needs (extra_buffer with overlap 5, no_buffer 3, radix cache off 1)."""
    if not layout.radix:
        return 1
    return 5 if layout.draft_tokens else 3


def weight_bytes(model: Model, layout: Layout) -> int:
    """Target weights on one GPU."""
    saved = model.halved_by_fp8 // 2 if layout.fp8 else 0
    return (model.target_bytes - saved) // layout.tp


def draft_bytes(model: Model, layout: Layout) -> int:
    """MTP head on one GPU."""
    return model.mtp_bytes // layout.tp if layout.draft_tokens else 0


def copies_bytes(model: Model, layout: Layout) -> int:
    """Embedding and head that the draft loads and gives back after the pools were sized."""
    return model.draft_copies_bytes // layout.tp if layout.draft_tokens else 0


def intermediates_per_request(model: Model, layout: Layout, version: Generation) -> int:
    """States that are allocated for the drafted tokens of one request."""
    drafts = layout.draft_tokens
    if not drafts or not model.linear_layers:
        return 0
    windows = (model.conv_kernel - 1) * drafts
    if version is Generation.V17:
        windows = model.conv_kernel - 2 + drafts
    return drafts * model.ssm_state_bytes(layout.ssm_bytes, layout.tp) + windows * model.conv_column_bytes(layout.tp)


def counted_kv_bytes(model: Model, layout: Layout, version: Generation) -> int:
    """KV bytes a token that the version's budget counts (the draft's only from 0.5.20)."""
    kv = model.kv_bytes_per_token(layout.kv_element_bytes, layout.tp)
    drafted = layout.draft_tokens and version is Generation.V23
    return kv + (model.draft_kv_bytes_per_token(layout.kv_element_bytes, layout.tp) if drafted else 0)


def counted_weights(model: Model, layout: Layout, version: Generation) -> int:
    """Weights that are loaded when the budget is made."""
    weights = weight_bytes(model, layout)
    if version is Generation.V11:
        return weights
    weights += draft_bytes(model, layout)
    return weights + (copies_bytes(model, layout) if version is Generation.V17 else 0)


def divide(
    model: Model, version: Generation, available: int, fraction: float, layout: Layout, overhead: int = 0
) -> Pools:
    """The pools of a start with `fraction`; `available` is free memory before the weights are loaded, `overhead` what
    loading takes beside them."""
    rest = available - counted_weights(model, layout, version) - overhead - available * (1 - fraction)
    wanted = layout.max_running or (DEFAULT_RUNNING_WITH_MTP if layout.draft_tokens else 4096)
    states = _states(model, version, rest, layout, wanted)
    requests = min(wanted, states // slots_per_request(layout)) if model.linear_layers else wanted
    state = model.state_bytes(layout.ssm_bytes, layout.tp)
    each = intermediates_per_request(model, layout, version)
    padded = states if version is Generation.V11 else states + (1 if model.linear_layers else 0)
    intermediates = (requests + 1) * each
    if version is Generation.V11:
        rest -= state * wanted * layout.draft_tokens + states * state
    else:
        rest -= padded * state + (requests + 1) * layout.draft_tokens * state
    if rest <= 0 or requests <= 0 or (model.linear_layers and states <= 0):
        why = f"Not enough memory: {rest / GIB:.1f} GiB would be left for the KV cache, {max(0, states)} states"
        return Pools(False, why, states=max(0, states))
    tokens = int(rest // counted_kv_bytes(model, layout, version))
    kv = tokens * (
        model.kv_bytes_per_token(layout.kv_element_bytes, layout.tp)
        + (model.draft_kv_bytes_per_token(layout.kv_element_bytes, layout.tp) if layout.draft_tokens else 0)
    )
    used = overhead + weight_bytes(model, layout) + draft_bytes(model, layout) + padded * state + intermediates + kv
    return Pools(True, "", requests, states, tokens, padded * state, intermediates, kv, available - used)


def _states(model: Model, version: Generation, rest: float, layout: Layout, wanted: int) -> int:
    """State slots (max_mamba_cache_size)."""
    if not model.linear_layers:
        return 0
    if layout.max_states is not None:
        return layout.max_states
    if not layout.radix:
        return wanted
    state, drafts = model.state_bytes(layout.ssm_bytes, layout.tp), layout.draft_tokens
    if version is Generation.V11:
        budget = (rest - state * wanted * drafts) * MAMBA_RATIO / (1 + MAMBA_RATIO)
        return int(budget // state)
    budget = rest * MAMBA_RATIO / (1 + MAMBA_RATIO)
    return int((budget - state * (1 + drafts)) // (state * (1 + drafts / slots_per_request(layout))))


def default_fraction(total: int, mtp: bool, vision: bool, tp: int = 1) -> float:
    """--mem-fraction-static when it is not given (0.5.11 `server_args.py` L1294-1475, with 3 MB a graph size as
    recorded)."""
    total_mb = total / (1 << 20)
    steps = ((20_000, 2048, 8), (35_000, 2048, 24), (60_000, 4096, 32), (160_000, 8192, 256))
    chunk, graphs = next(((c, g) for limit, c, g in steps if total_mb < limit), (16_384, 512))
    reserved = 512 + max(chunk, 2048) * 1.5 + graphs * 3 + tp / 8 * 1024
    if total_mb > 60_000:
        reserved = max(reserved, 10_240)
    fraction = (total_mb - reserved - (4096 if mtp else 0)) / total_mb
    return fraction * (VISION_FACTOR if vision else 1.0)


def defaults(model: Model, version: Generation, total: int, available: int, draft_tokens: int) -> Pools:
    """What SGLang gives with no memory flag at all: radix cache on, 48 running requests with MTP."""
    fraction = default_fraction(total, bool(draft_tokens), model.vision)
    return divide(model, version, available, fraction, Layout(None, draft_tokens, radix=True))
