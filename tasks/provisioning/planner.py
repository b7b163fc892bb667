"""How many requests fit on a GPU, with how much context and which memory fraction: pure arithmetic, no GPU needed.

SGLang's defaults waste a third of an H200 on Qwen3.6-27B with MTP (22 running requests, 37.6 GB free). This plan
turns the question round: what must stay free is reserved first, and the rest is divided among as many requests as it
holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tasks.provisioning.model_config import Model
from tasks.provisioning.pools import (
    GIB,
    Generation,
    Layout,
    Pools,
    copies_bytes,
    counted_kv_bytes,
    counted_weights,
    default_fraction,
    defaults,
    divide,
    draft_bytes,
    generation,
    slots_per_request,
    weight_bytes,
)

LOAD_OVERHEAD_BYTES = int(0.11 * GIB)
"""Taken beside the weights while they load (recorded: 51.06 GiB gone for 50.96 GiB of weights)."""
WORKSPACE_BYTES = 3 * GIB
"""Kernels' workspaces and the allocator's gaps; SGLang's tuning page wants 5 to 8 GB left after start in all."""
GRAPH_BYTES = int(1.6 * GIB)
"""Recorded: 0.79 GiB for verifying and 0.73 for drafting, four sizes up to 64 requests."""
PREFILL_CHUNK_TOKENS = 8192
MAX_RUNNING = 256
"""More than this never paid in the recorded sweeps, and every graph size costs start time."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of one server. `need_tokens`: context that a single request must get; 0: whatever fits."""

    version: str
    draft_tokens: int = 0
    mean_tokens: int = 4096
    need_tokens: int = 0
    slots: int | None = None
    fraction: float | None = None
    radix: bool = False
    ssm_bytes: int | None = None
    fp8: bool = False
    tp: int = 1

    @property
    def generation(self) -> Generation:
        """Whose memory formulas hold."""
        return generation(self.version)

    def layout(self, running: int | None) -> Layout:
        """The knobs of a start with so many running requests."""
        layout = Layout(running, self.draft_tokens, self.radix, self.ssm_bytes, fp8=self.fp8, tp=self.tp)
        states = slots_per_request(layout) * running if self.radix and running else None
        return replace(layout, max_states=states)


@dataclass(frozen=True, slots=True)
class Plan:
    """One server's memory. `problems` say what does not fit, `knobs` what would make it fit."""

    fits: bool
    request: Request
    available_bytes: int
    max_running: int
    fraction: float
    context_tokens: int
    pools: Pools
    reserve_bytes: int
    per_request_bytes: int
    lines: tuple[tuple[str, int], ...]
    problems: tuple[str, ...] = ()
    knobs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def kv_tokens(self) -> int:
        """Tokens that all running requests share."""
        return self.pools.kv_tokens

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form for records and `regen fit --json`."""
        return {
            "fits": self.fits,
            "sglang": self.request.version,
            "formulas": self.request.generation.value,
            "tensor_parallel": self.request.tp,
            "mtp_draft_tokens": self.request.draft_tokens,
            "available_gib": round(self.available_bytes / GIB, 2),
            "max_running_requests": self.max_running,
            "mem_fraction_static": self.fraction,
            "context_tokens": self.context_tokens,
            "kv_tokens": self.kv_tokens,
            "state_slots": self.pools.states,
            "bytes": dict(self.lines),
            "per_request_bytes": self.per_request_bytes,
            "problems": list(self.problems),
            "knobs": list(self.knobs),
            "notes": list(self.notes),
        }


def plan(model: Model, available: int, request: Request, explain: bool = True) -> Plan:
    """Fill one GPU (or each of a group of `tp`) that has `available` bytes free. Raises nothing: see `fits`."""
    layout = request.layout(None)
    refused = _refusals(model, request)
    budget = _budget(model, available, request)
    by_mean = _running(model, request, budget, request.mean_tokens, 0)
    by_context = _running(model, request, budget, 0, max(request.need_tokens, request.mean_tokens))
    running = min(by_mean, by_context, MAX_RUNNING) if request.slots is None else request.slots
    problems = list(refused)
    if not refused and (running < 1 or running > by_context):
        problems.append(_shortage(request, running, by_context, budget))
    fits = not problems
    running = max(running, 0)
    fraction = request.fraction or (_fraction(model, available, request, running) if fits else 0.0)
    pools = Pools(False, problems[0]) if problems else _predict(model, available, request, running, fraction)
    if fits and (not pools.ok or pools.kv_tokens < 1):
        fits, problems = False, [pools.why or "no KV cache would be left"]
    reserve = _reserve(model, request, running)
    notes = _notes(request, pools, running, by_mean, reserve) if fits else []
    limit = min(model.max_position, pools.kv_tokens)
    return Plan(
        fits,
        request,
        available,
        running if fits else 0,
        fraction,
        limit,
        pools,
        reserve,
        _per_request(model, request, request.mean_tokens),
        tuple(_lines(model, request, layout, pools, reserve)),
        tuple(problems),
        tuple(_knobs(model, available, request)) if problems and explain else (),
        tuple(notes),
    )


def smallest_group(model: Model, available: int, request: Request, gpus: int, tp: int | None = None) -> Plan:
    """The plan with the smallest tensor-parallel group that fits; the one for the largest group when none does."""
    sizes = [tp] if tp else [n for n in (1, 2, 4, 8, 16) if n <= max(gpus, 1) and (n == 1 or model.splits(n))]
    made = None
    for size in sizes:
        made = plan(model, available, replace(request, tp=size))
        if made.fits:
            return made
    assert made is not None
    return made


def default_plan(model: Model, total: int, available: int, request: Request) -> dict[str, Any]:
    """What SGLang's own defaults give on the same card, for comparison."""
    pools = defaults(model, request.generation, total, available, request.draft_tokens)
    fraction = default_fraction(total, bool(request.draft_tokens), model.vision)
    return {
        "fits": pools.ok,
        "running_requests": pools.requests,
        "kv_tokens": pools.kv_tokens,
        "mem_fraction_static": round(fraction, 4),
        "free_gib": round(pools.free_bytes / GIB, 1),
        "why": pools.why,
    }


def _refusals(model: Model, request: Request) -> list[str]:
    found = []
    if request.draft_tokens and model.mtp_weights is False:
        found.append(
            f"MTP is asked for, but {model.source} has no mtp.* weights (quantized re-uploads often drop them): "
            "take the original checkpoint, or set target.mtp to false"
        )
    if request.tp > 1 and not model.splits(request.tp):
        found.append(
            f"{model.kv_heads} KV heads and {model.value_heads} value heads do not divide over {request.tp} GPUs"
        )
    if request.need_tokens > model.max_position:
        found.append(
            f"a context of {request.need_tokens:,} tokens is wanted, the model has {model.max_position:,}: "
            "lower sampling.max_tokens or serving.context_tokens"
        )
    return found


def _reserve(model: Model, request: Request, running: int) -> int:
    """What must stay free: workspaces, graphs, one prefill chunk's activations, logits; and the draft's passing
    copies."""
    activations = (
        PREFILL_CHUNK_TOKENS * (2 * model.intermediate // request.tp + 4 * model.hidden) * 2 * model.element_bytes
    )
    reserve = WORKSPACE_BYTES + GRAPH_BYTES + activations + running * _logits(model, request)
    return max(reserve, copies_bytes(model, request.layout(None)) + GIB)


def _logits(model: Model, request: Request) -> int:
    """fp32 logits of the verified tokens of one request, three copies (logits, probabilities, sorted)."""
    return max(1, request.draft_tokens) * model.vocab * 4 * 3 // request.tp


def _per_request(model: Model, request: Request, tokens: int) -> int:
    layout = request.layout(None)
    state = model.state_bytes(request.ssm_bytes, request.tp)
    return state * (slots_per_request(layout) + request.draft_tokens) + tokens * _kv(model, request)


def _kv(model: Model, request: Request) -> int:
    draft = model.draft_kv_bytes_per_token(tp=request.tp) if request.draft_tokens else 0
    return model.kv_bytes_per_token(tp=request.tp) + draft


def _budget(model: Model, available: int, request: Request) -> int:
    """Bytes for states and KV of all requests; negative where the weights alone are too much."""
    layout = request.layout(None)
    padding = model.state_bytes(request.ssm_bytes, request.tp) * (1 + request.draft_tokens)
    if request.fraction is not None:
        counted = counted_weights(model, layout, request.generation)
        return int(available * request.fraction) - counted - LOAD_OVERHEAD_BYTES - padding
    weights = weight_bytes(model, layout) + draft_bytes(model, layout) + LOAD_OVERHEAD_BYTES
    return available - weights - padding - _reserve(model, request, 0)


def _running(model: Model, request: Request, budget: int, mean: int, together: int) -> int:
    """Requests that fit when each holds `mean` tokens and all of them at least `together`."""
    logits = _logits(model, request) if request.fraction is None else 0
    each = _per_request(model, request, mean) + logits
    left = budget - together * _kv(model, request)
    if each <= 0:
        return MAX_RUNNING if left > 0 else 0
    return max(0, left // each)


def _fraction(model: Model, available: int, request: Request, running: int) -> float:
    """The --mem-fraction-static at which exactly the reserve stays free, rounded down to a thousandth."""
    layout = request.layout(running)
    state = model.state_bytes(request.ssm_bytes, request.tp)
    weights = weight_bytes(model, layout) + draft_bytes(model, layout) + LOAD_OVERHEAD_BYTES
    pools = available - weights - _reserve(model, request, running)
    fixed = state * ((running * slots_per_request(layout) + 1) + (running + 1) * request.draft_tokens)
    counted_share = counted_kv_bytes(model, layout, request.generation) / max(1, _kv(model, request))
    rest = fixed + max(0, pools - fixed) * counted_share
    counted = counted_weights(model, layout, request.generation) + LOAD_OVERHEAD_BYTES
    return min(0.985, int((counted + rest) / available * 1000) / 1000)


def _predict(model: Model, available: int, request: Request, running: int, fraction: float) -> Pools:
    return divide(model, request.generation, available, fraction, request.layout(running), LOAD_OVERHEAD_BYTES)


def _shortage(request: Request, running: int, possible: int, budget: int) -> str:
    if budget <= 0:
        return f"the weights and the reserve need {-budget / GIB:.1f} GiB more than is there"
    if request.slots is not None and possible > 0:
        return f"{running} running requests do not fit, {possible} do"
    need = max(request.need_tokens, request.mean_tokens)
    return f"not one request with {need:,} tokens fits into the {budget / GIB:.1f} GiB left beside the weights"


def _notes(request: Request, pools: Pools, running: int, by_mean: int, reserve: int) -> list[str]:
    notes = []
    if running > by_mean:
        notes.append(
            f"KV holds {pools.kv_tokens // max(1, running):,} tokens a request, {request.mean_tokens:,} are expected: "
            "requests will be retracted"
        )
    if request.fraction is not None and pools.free_bytes < reserve * 0.6:
        notes.append(
            f"the fraction {request.fraction} leaves {pools.free_bytes / GIB:.1f} GiB for graphs and activations, "
            f"{reserve / GIB:.1f} are wanted: starting is not proof of fitting"
        )
    return notes


def _lines(model: Model, request: Request, layout: Layout, pools: Pools, reserve: int) -> Iterator[tuple[str, int]]:
    yield "weights", weight_bytes(model, layout) + LOAD_OVERHEAD_BYTES
    yield "mtp_head", draft_bytes(model, layout)
    yield "state_per_request", model.state_bytes(request.ssm_bytes, request.tp) if model.linear_layers else 0
    yield "kv_per_token", _kv(model, request)
    yield "states", pools.state_bytes
    yield "draft_intermediates", pools.intermediate_bytes
    yield "kv_cache", pools.kv_bytes
    yield "reserve", reserve
    yield "free_before_graphs", pools.free_bytes


def _knobs(model: Model, available: int, request: Request) -> Iterator[str]:
    """Single changes with which it would fit, the harmless ones first."""
    bf16 = request.ssm_bytes != 2 and model.ssm_bytes == 4 and bool(model.linear_layers)
    changes: list[tuple[bool, str, dict[str, Any]]] = [
        (request.slots is not None, "leave serving.slots empty", {"slots": None}),
        (request.fraction is not None, "leave serving.mem_fraction empty", {"fraction": None}),
        (request.radix, "serving.radix_cache: false", {"radix": False}),
        (request.need_tokens > 8192, "sampling.max_tokens or serving.context_tokens of 8192", {"need_tokens": 8192}),
        (request.mean_tokens > 2048, "serving.mean_tokens of 2048", {"mean_tokens": 2048}),
        *((True, f"serving.tensor_parallel: {n}", {"tp": n}) for n in (2, 4, 8) if n > request.tp),
        (bf16, "target.state_dtype: bfloat16 (changes numerics)", {"ssm_bytes": 2}),
        (not request.fp8 and model.halved_by_fp8 > 0, "target.quantization: fp8 (changes the data)", {"fp8": True}),
        (request.draft_tokens > 0, "target.mtp: false (slower)", {"draft_tokens": 0}),
    ]
    split = False
    for possible, text, change in changes:
        if "tp" in change and split:
            continue
        if possible and plan(model, available, replace(request, **change), explain=False).fits:
            split = split or "tp" in change
            yield text
