"""What a starting server's log says: how far it is, and what went wrong. Strings are those of the recorded logs and of
0.5.11's and 0.5.23's sources; several failures share a text and are told apart by what came before it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MILESTONES: tuple[tuple[str, str], ...] = (
    ("arguments", r"server_args="),
    ("loading weights", r"Load weight begin"),
    ("weights loaded", r"Load weight end"),
    ("states allocated", r"Mamba Cache is allocated"),
    ("KV cache allocated", r"KV Cache is allocated"),
    ("capturing graphs", r"Capture (target verify |target prefill )?(cuda|CUDA) graph begin"),
    ("draft graphs", r"Capture draft.* (cuda|CUDA) graph (begin|end)"),
    ("memory settled", r"max_total_num_tokens=\d+"),
    ("ready", r"The server is fired up and ready to roll"),
)
"""In the order of a start; the furthest one seen is where it is."""


class Failure(StrEnum):
    """Why a start failed. The ladder knows what to turn for each."""

    TOO_MANY_REQUESTS = "state reserve too large"
    FRACTION_TOO_LOW = "memory fraction too low"
    STATE_CACHE_TOO_SMALL = "state cache too small"
    OOM_POOLS = "out of GPU memory while pools were made"
    OOM_GRAPHS = "out of GPU memory while graphs were captured"
    OOM_WEIGHTS = "weights do not fit"
    OOM_RUNNING = "out of GPU memory while running"
    GPU_OCCUPIED = "another process holds GPU memory"
    RADIX_WITH_MTP = "MTP and radix cache need extra_buffer"
    STRATEGY_WITHOUT_RADIX = "extra_buffer needs the radix cache"
    HOST_MEMORY = "hierarchical cache does not fit into host memory"
    UNKNOWN_FLAG = "the server does not know a flag"
    PORT_TAKEN = "the port is taken"
    NO_MODULE = "sglang or one of its packages is missing"
    MODEL_MISSING = "the model cannot be read"
    NO_DRIVER = "no usable GPU driver"
    WARM_UP = "the warm-up request failed"
    SCHEDULER_CRASHED = "a server process crashed"
    TIMEOUT = "not ready in time"
    UNKNOWN = "unknown"


FAILURES: tuple[tuple[Failure, str], ...] = (
    (
        Failure.UNKNOWN_FLAG,
        r"error: (?:unrecognized arguments|ambiguous option|argument .+: (?:invalid choice|expected))[^\n]*",
    ),
    (Failure.RADIX_WITH_MTP, r"Speculative decoding for \S+ is not compatible with radix cache[^\n]*"),
    (
        Failure.STRATEGY_WITHOUT_RADIX,
        r"extra_buffer[^\n]*(?:disable[-_]radix[-_]cache|not compatible with disabling)[^\n]*",
    ),
    (Failure.HOST_MEMORY, r"Not enough host memory (?!for request)[^\n]*"),
    (Failure.GPU_OCCUPIED, r"The memory capacity is unbalanced[^\n]*"),
    (
        Failure.STATE_CACHE_TOO_SMALL,
        r"Not enough GPU memory for hybrid[^\n]*|Hybrid \(mamba/linear-attention\) state cache is too small[^\n]*",
    ),
    (Failure.FRACTION_TOO_LOW, r"Loaded weights leave no GPU memory for the KV cache[^\n]*"),
    (Failure.FRACTION_TOO_LOW, r"Not enough memory\. Please try to increase --mem-fraction-static[^\n]*"),
    (Failure.OOM_GRAPHS, r"Capture [^\n]*graph failed[^\n]*"),
    (Failure.OOM_POOLS, r"(?:torch\.OutOfMemoryError|CUDA out of memory|CUDA error: out of memory)[^\n]*"),
    (
        Failure.OOM_RUNNING,
        r"(?:(?:Prefill|Decode) out of memory\.|alloc_req_slots runs out of memory|Can not alloc mamba cache)[^\n]*",
    ),
    (Failure.OOM_RUNNING, r"Not enough space for mamba (?:cache|ping pong)[^\n]*"),
    (Failure.PORT_TAKEN, r"[^\n]*(?:address already in use|Address already in use)[^\n]*"),
    (Failure.NO_MODULE, r"(?:^|\n)(?:ModuleNotFoundError|ImportError): [^\n]*|No module named [^\n]*"),
    (
        Failure.NO_DRIVER,
        r"(?:No CUDA GPUs are available|Found no NVIDIA driver|CUDA driver version is insufficient)[^\n]*",
    ),
    (
        Failure.MODEL_MISSING,
        r"(?:OSError|RepositoryNotFoundError|HFValidationError|ValueError)[^\n]*"
        r"(?:not a local folder|not a valid model|Repo id|does not appear to have|Unrecognized model)[^\n]*",
    ),
    (Failure.WARM_UP, r"Initialization failed\. warmup error:[^\n]*"),
    (
        Failure.SCHEDULER_CRASHED,
        r"Scheduler hit an exception[^\n]*|Subprocess \S+ \(pid=\d+\) crashed with exit code -?\d+"
        r"|watchdog timeout[^\n]*",
    ),
)
"""First match wins: causes stand before consequences (every -9 log ends with a line about SIGQUIT)."""


@dataclass(frozen=True, slots=True)
class StartFacts:
    """Numbers that a start wrote into its log; None where it did not get that far. GB as SGLang prints them (2^30)."""

    milestone: str = ""
    available_gb: float | None = None
    weights_gb: float | None = None
    draft_gb: float | None = None
    state_slots: int | None = None
    state_gb: float | None = None
    intermediate_gb: float | None = None
    kv_tokens: int | None = None
    max_running_requests: int | None = None
    context_tokens: int | None = None
    free_gb: float | None = None
    draft_graphs: bool = False
    speculation_noted: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the run's record."""
        return {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) not in (None, "")}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A failed start: what it was, the line that says so, and a number that the line gave (a fraction to exceed)."""

    failure: Failure
    evidence: str
    hint: float | None = None
    flag: str = ""


def read_facts(log: str) -> StartFacts:
    """Everything the planner and the MTP proof want to know from a log, in any of the recorded versions."""
    loads = re.findall(r"Load weight end\..*?type=(\w+), avail mem=([\d.]+) GB, mem usage=(-?[\d.]+) GB", log)
    target = [float(usage) for kind, _, usage in loads if not kind.endswith("MTP")]
    draft = [float(usage) for kind, _, usage in loads if kind.endswith("MTP")]
    settled = re.search(
        r"max_total_num_tokens=(\d+).*?max_running_requests=(\d+), context_len=(\d+), available_gpu_mem=([\d.]+)", log
    )
    intermediate = re.search(
        r"intermediate_ssm_state_cache size: ([\d.]+)GB intermediate_conv_window_cache size: ([\d.]+)GB", log
    )
    states = re.search(r"max_mamba_cache_size: (\d+), conv_state size: ([\d.]+)GB, ssm_state size: ([\d.]+)GB", log)
    return StartFacts(
        milestone=milestone(log),
        available_gb=_number(r"Load weight begin\. avail mem=([\d.]+)", log),
        weights_gb=target[0] if target else None,
        draft_gb=draft[0] if draft else None,
        state_slots=int(states[1]) if states else None,
        state_gb=float(states[2]) + float(states[3]) if states else None,
        intermediate_gb=float(intermediate[1]) + float(intermediate[2]) if intermediate else None,
        kv_tokens=int(settled[1]) if settled else None,
        max_running_requests=int(settled[2]) if settled else None,
        context_tokens=int(settled[3]) if settled else None,
        free_gb=float(settled[4]) if settled else None,
        draft_graphs=bool(re.search(r"Capture (draft|target verify).* (cuda|CUDA) graph end", log)),
        speculation_noted=bool(draft) or "for speculative decoding" in log,
    )


def milestone(log: str) -> str:
    """The furthest milestone in the log."""
    reached = ""
    for name, pattern in MILESTONES:
        if re.search(pattern, log):
            reached = name
    return reached


def diagnose(log: str, exit_code: int | None) -> Diagnosis:
    """Why a server ended, or (`exit_code` None) why it is not ready. Never raises; an unknown end is UNKNOWN with the
    log's last words."""
    for failure, pattern in FAILURES:
        found = re.search(pattern, log)
        if found:
            return _refine(failure, found.group(0).strip(), log, found.start())
    if exit_code is None:
        return Diagnosis(Failure.TIMEOUT, milestone(log) or "no output yet")
    return Diagnosis(Failure.UNKNOWN, f"exit code {exit_code}; last line: {last_line(log)}")


def _refine(failure: Failure, evidence: str, log: str, at: int) -> Diagnosis:
    before = log[:at]
    evidence = evidence[:400]
    if failure is Failure.UNKNOWN_FLAG:
        return Diagnosis(failure, evidence, flag=next(iter(re.findall(r"--[\w-]+", evidence)), ""))
    if failure is Failure.FRACTION_TOO_LOW:
        hint = re.search(r"above ([\d.]+)", evidence)
        # With speculation the reserve for requests × draft tokens is taken first, and the text is the same.
        speculating = re.search(r"for speculative decoding|[Ss]pec v2|speculative_algorithm='(?:EAGLE|NEXTN)", before)
        if not hint:
            return Diagnosis(Failure.TOO_MANY_REQUESTS if speculating else failure, evidence)
        # The number says what the weights need; where the fraction is above it, states and drafts were too much.
        least, now = float(hint[1].rstrip(".")), re.search(r"--mem-fraction-static=([\d.]+\d)", evidence)
        if now and float(now[1]) >= least:
            return Diagnosis(Failure.TOO_MANY_REQUESTS, evidence)
        return Diagnosis(failure, evidence, least)
    if failure is Failure.OOM_POOLS:
        if "Load weight end" not in before:
            return Diagnosis(Failure.OOM_WEIGHTS, evidence)
        ready = re.search(MILESTONES[-1][1], before)
        capturing = re.search(r"Capture [^\n]*begin(?![\s\S]*Capture [^\n]*end)", before)
        when = Failure.OOM_RUNNING if ready else Failure.OOM_GRAPHS if capturing else Failure.OOM_POOLS
        return Diagnosis(when, evidence)
    return Diagnosis(failure, evidence)


def last_line(log: str) -> str:
    """The last line that says something."""
    lines: Iterable[str] = reversed(log.splitlines())
    return next((line.strip() for line in lines if line.strip()), "(the log is empty)")[:300]


def _number(pattern: str, log: str) -> float | None:
    found = re.search(pattern, log)
    return float(found[1]) if found else None
