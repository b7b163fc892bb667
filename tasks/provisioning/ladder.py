"""From a failed start to the next thing to try: a pure function, one knob at a time, the harmless ones first."""

import re
from dataclasses import dataclass, replace

from tasks.provisioning.arguments import StartConfig
from tasks.provisioning.startup import Diagnosis, Failure

MAX_FRACTION = 0.975
MIN_FRACTION = 0.10
GIB_PATTERN = (
    r"Tried to allocate ([\d.]+) (GiB|MiB)\. "
    r"GPU \d+ has a total capacity of ([\d.]+) GiB of which ([\d.]+) (GiB|MiB) is free"
)

OPTIONAL_FLAGS = frozenset(
    {
        "--mm-feature-transport",
        "--disable-prefill-cuda-graph",
        "--disable-piecewise-cuda-graph",
        "--cuda-graph-max-bs",
        "--cuda-graph-max-bs-decode",
        "--tool-call-parser",
        "--mamba-scheduler-strategy",
        "--mamba-radix-cache-strategy",
    }
)
"""Flags without which a server still does its work, should a version have renamed them."""

HOPELESS = {
    Failure.OOM_WEIGHTS: "more GPUs for a server (serving.tensor_parallel), FP8 (serving.allow_fp8) or a larger card",
    Failure.GPU_OCCUPIED: "end the other processes on these GPUs",
    Failure.NO_MODULE: "install sglang in the environment that serving.python names",
    Failure.NO_DRIVER: "this machine shows no usable NVIDIA GPU to SGLang: check nvidia-smi and CUDA_VISIBLE_DEVICES",
    Failure.MODEL_MISSING: "check target.model and target.revision, and that the files are on this machine",
    Failure.TIMEOUT: "raise serving.start_timeout_s if the log shows progress",
    Failure.UNKNOWN_FLAG: "serving.sglang_version must name the installed version; check serving.extra_args",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the ladder may turn. `data_begun`: completions exist, so nothing that changes the data may change."""

    allow_bf16: bool = False
    allow_fp8: bool = False
    data_begun: bool = False
    fixed_flags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Step:
    """The next attempt and why. `changes_data`: identity fields that differ from the spec from now on."""

    config: StartConfig
    reason: str
    new_port: bool = False
    changes_data: tuple[str, ...] = ()


def turn(config: StartConfig, diagnosis: Diagnosis, limits: Limits, tried: tuple[StartConfig, ...] = ()) -> Step | None:
    """The first rung that this failure calls for, that is allowed and was not tried; None when there is none."""
    for step in _rungs(config, diagnosis, limits):
        again = step.config == config
        if step.changes_data and limits.data_begun:
            continue
        if not again and step.config in tried:
            continue
        if again and not step.new_port and tried.count(config) > 1:
            continue
        return step
    return None


def advice(failure: Failure) -> str:
    """What a person can do when the ladder ends."""
    return HOPELESS.get(failure, "read the log, and try `regen fit` for a plan by hand")


def _rungs(config: StartConfig, diagnosis: Diagnosis, limits: Limits) -> list[Step]:
    failure = diagnosis.failure
    fewer, higher = _fewer(config, limits, 0.6), _higher(config, diagnosis, limits)
    by_failure: dict[Failure, list[Step | None]] = {
        Failure.TOO_MANY_REQUESTS: [fewer, higher, *_smaller(config, limits)],
        Failure.FRACTION_TOO_LOW: [higher, fewer, *_smaller(config, limits)],
        Failure.STATE_CACHE_TOO_SMALL: [fewer, higher, *_smaller(config, limits)],
        Failure.OOM_POOLS: [_lower(config, diagnosis, limits), fewer, *_smaller(config, limits)],
        Failure.OOM_GRAPHS: [
            *_prefill_graph(config, diagnosis),
            _lower(config, diagnosis, limits),
            _graphs(config),
            fewer,
            *_smaller(config, limits),
        ],
        Failure.OOM_RUNNING: [_lower(config, diagnosis, limits), fewer, *_smaller(config, limits)],
        Failure.OOM_WEIGHTS: [_fp8(config, limits)],
        Failure.RADIX_WITH_MTP: [_plain_cache(config)],
        Failure.STRATEGY_WITHOUT_RADIX: [_plain_cache(config), _drop(config, "--mamba-scheduler-strategy")],
        Failure.HOST_MEMORY: [_plain_cache(config)],
        Failure.UNKNOWN_FLAG: [_drop(config, diagnosis.flag)],
        Failure.PORT_TAKEN: [Step(config, "another port: this one was taken meanwhile", new_port=True)],
        Failure.WARM_UP: [Step(config, "once more unchanged: the warm-up request failed")],
        Failure.SCHEDULER_CRASHED: [Step(config, "once more unchanged: a process crashed"), fewer],
        Failure.UNKNOWN: [Step(config, "once more unchanged: the log does not tell why")],
    }
    return [step for step in by_failure.get(failure, []) if step is not None]


def _fewer(config: StartConfig, limits: Limits, share: float) -> Step | None:
    running = max(1, int(config.max_running * share))
    if running == config.max_running or "--max-running-requests" in limits.fixed_flags:
        return None
    states = None if config.max_states is None else max(1, config.max_states * running // config.max_running)
    changed = replace(config, max_running=running, max_states=states, graph_size=None)
    return Step(changed, f"running requests {config.max_running} → {running}")


def _higher(config: StartConfig, diagnosis: Diagnosis, limits: Limits) -> Step | None:
    wanted = diagnosis.hint + 0.02 if diagnosis.hint else config.mem_fraction + 0.05
    return _fraction(config, min(MAX_FRACTION, wanted), limits)


def _lower(config: StartConfig, diagnosis: Diagnosis, limits: Limits) -> Step | None:
    """By what the allocator said was missing, at least 0.05.

    The usual victim is the draft's KV cache, made after the pools: keys and values are two equal allocations, and a
    lower fraction shrinks them as well as the pools.
    """
    cut = 0.05
    found = re.search(GIB_PATTERN, diagnosis.evidence)
    if found:
        wanted, free, total = 2 * _gib(found[1], found[2]), _gib(found[4], found[5]), float(found[3])
        shrinks = total * (1 + wanted / (config.mem_fraction * total))
        cut = max(cut, (wanted - free) / shrinks + 0.02)
    return _fraction(config, max(MIN_FRACTION, config.mem_fraction - cut), limits)


def _fraction(config: StartConfig, value: float, limits: Limits) -> Step | None:
    value = round(value, 3)
    if value == config.mem_fraction or "--mem-fraction-static" in limits.fixed_flags:
        return None
    return Step(replace(config, mem_fraction=value), f"memory fraction {config.mem_fraction} → {value}")


def _prefill_graph(config: StartConfig, diagnosis: Diagnosis) -> list[Step | None]:
    """The prefill's graphs cost start time and memory and bring little where answers are long."""
    if not config.prefill_graph or "prefill" not in diagnosis.evidence:
        return []
    return [Step(replace(config, prefill_graph=False), "no graphs for the prefill")]


def _graphs(config: StartConfig) -> Step | None:
    size = max(1, (config.graph_size or config.max_running) // 2)
    if size == config.graph_size and not config.prefill_graph:
        return None
    return Step(
        replace(config, graph_size=size, prefill_graph=False), f"graphs up to {size} requests, none for the prefill"
    )


def _smaller(config: StartConfig, limits: Limits) -> list[Step | None]:
    bf16 = None
    if limits.allow_bf16 and config.state_dtype != "bfloat16":
        changed = replace(config, state_dtype="bfloat16")
        bf16 = Step(
            changed, "recurrent state in bf16 (allowed; changes numerics)", changes_data=("target.state_dtype",)
        )
    return [bf16, _fp8(config, limits)]


def _fp8(config: StartConfig, limits: Limits) -> Step | None:
    if not limits.allow_fp8 or config.quantization is not None:
        return None
    changed = replace(config, quantization="fp8")
    return Step(changed, "weights in FP8 (allowed; changes the data)", changes_data=("target.quantization",))


def _plain_cache(config: StartConfig) -> Step | None:
    if not config.radix and not config.hierarchical:
        return None
    changed = replace(config, radix=False, hierarchical=False, max_states=None)
    return Step(changed, "radix and hierarchical cache off: prompts are unique")


def _drop(config: StartConfig, flag: str) -> Step | None:
    if flag not in OPTIONAL_FLAGS or flag in config.dropped:
        return None
    return Step(replace(config, dropped=(*config.dropped, flag)), f"without {flag}, which this version does not know")


def _gib(number: str, unit: str) -> float:
    return float(number) / (1024 if unit == "MiB" else 1)
