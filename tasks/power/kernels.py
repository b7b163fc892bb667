"""Kernel names to the work they do, and a profiler trace to shares of time."""

import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tasks.errors import ServerError

CATEGORIES: tuple[tuple[str, str], ...] = (
    ("all_reduce", r"nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device|one_?shot|two_?shot|multimem|nvshmem"),
    ("gated_delta", r"gated_delta|delta_rule|fused_recurrent|gdn|causal_conv1d|chunk_(fwd|bwd|local|gated|scaled|o_)"
     r"|solve_tril|recompute_w_u|selective_scan|mamba|ssm_|l2norm_fwd|_state_(update|passing)"),
    ("moe", r"moe|expert|grouped_?gemm|group_gemm|topk_?gating|deep_?ep|permute_tokens"),
    ("sampling", r"sampl|multinomial|top_?[kp]_?(mask|renorm|top|prob)|renorm|argmax|verify_tree|build_tree|tree_spec"
     r"|eagle|cunn_softmax|radix_?sort|sort_?pairs"),
    ("attention", r"flash(?!infer)|fmha|attention|attn|mha_|paged|batch_?(prefill|decode)|merge_state|_fwd_kernel"
     r"|_fwd_grouped|rotary|rope|kv_?cache|set_kv|store_cache"),
    ("gemm", r"gemm|gemv|cutlass|cublas|nvjet|wgmma|xmma|splitk|s16816|s1688|s884|matmul|_mm_|dot_kernel"),
    ("elementwise", r"norm|silu|gelu|act_and_mul|elementwise|vectorized|copy_kernel|fill|index|gather|scatter"
     r"|cat_?array|reduce_kernel|embedding|arange|cumsum|where|triton_(poi|red|per)"),
)  # fmt: skip
"""First match wins. MLP and projections are `gemm` in a dense model, `moe` in an expert model."""
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in CATEGORIES)
OLD_KERNELS = re.compile(r"sm_?(70|75|80|86)|ampere_|volta_|turing_|s16816|s1688|s884", re.IGNORECASE)
"""Names of tensor-core kernels written for Ampere or older."""
FALLBACK = re.compile(r"dequant|marlin|emulat|fallback|torch_native|naive", re.IGNORECASE)
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Profile:
    """A profiled stretch. Fractions of the GPU's time; `shares` and `gaps` add up to 1."""

    window_s: float
    gaps: float
    shares: Mapping[str, float]
    top: tuple[tuple[str, float, int], ...]
    kernels: int
    graph_launches: int
    kernel_launches: int
    longest_gap_s: float
    devices: int
    old_gemm: float
    fallback: float

    @property
    def graphs_used(self) -> bool | None:
        """Whether CUDA graphs were replayed; None when the trace has no launches at all."""
        return self.graph_launches > 0 if self.graph_launches or self.kernel_launches else None


def category(name: str, kind: str = "kernel") -> str:
    """What a kernel works on: a name of CATEGORIES, `memcpy`, or `other`."""
    if kind != "kernel":
        return "memcpy"
    return next((label for label, pattern in _PATTERNS if pattern.search(name)), "other")


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Events of a torch profiler trace (.json or .json.gz). Raises ServerError when it is not one."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = orjson.loads(data)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{path} is not a whole profiler trace: {error}; profile again") from error
    return [event for event in events if isinstance(event, dict)]


def summarize_trace(events: Iterable[Mapping[str, Any]]) -> Profile | None:
    """Shares of GPU time by work, over all devices of the trace. None when nothing ran on a GPU.

    A category's share is its kernels' time, scaled so that overlapping streams still add up to the busy time; gaps are
    the time in which a device ran nothing between its first and last kernel.
    """
    work, launches = _split(events)
    if not work:
        return None
    devices: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for _, _, start, end, device in work:
        devices[device].append((start, end))
    spans = [_busy(sorted(intervals)) for intervals in devices.values()]
    window = sum(span.window for span in spans)
    busy = sum(span.busy for span in spans)
    durations: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for name, kind, start, end, _ in work:
        durations[category(name, kind)] += end - start
        names[name] += end - start
        counts[name] += 1
    total = sum(durations.values()) or 1.0
    busy_share = busy / window if window > 0 else 0.0
    gemm = sum(d for n, d in names.items() if category(n) in ("gemm", "moe")) or 1.0
    best = sorted(names.items(), key=lambda item: -item[1])[:12]
    return Profile(
        window_s=window / len(spans) / 1e6,
        gaps=1.0 - busy_share,
        shares={name: d / total * busy_share for name, d in sorted(durations.items(), key=lambda item: -item[1])},
        top=tuple((name, d / total * busy_share, counts[name]) for name, d in best),
        kernels=len(work),
        graph_launches=launches["graph"],
        kernel_launches=launches["kernel"],
        longest_gap_s=max(span.longest_gap for span in spans) / 1e6,
        devices=len(spans),
        old_gemm=sum(d for n, d in names.items() if category(n) in ("gemm", "moe") and OLD_KERNELS.search(n)) / gemm,
        fallback=sum(d for n, d in names.items() if FALLBACK.search(n)) / total,
    )


Work = tuple[str, str, float, float, Any]


def _split(events: Iterable[Mapping[str, Any]]) -> tuple[list[Work], Counter[str]]:
    """(device work, launch counts); times in microseconds, as the trace has them."""
    work: list[Work] = []
    launches: Counter[str] = Counter(graph=0, kernel=0)
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))
        if kind in DEVICE_WORK:
            start = float(event.get("ts", 0.0))
            device = (event.get("args") or {}).get("device", event.get("pid"))
            work.append((name, kind, start, start + float(event.get("dur", 0.0)), device))
        elif kind in ("cuda_runtime", "cuda_driver"):
            launches["graph"] += "GraphLaunch" in name
            launches["kernel"] += "LaunchKernel" in name
    return work, launches


@dataclass(frozen=True, slots=True)
class _Span:
    window: float
    busy: float
    longest_gap: float


def _busy(intervals: Sequence[tuple[float, float]]) -> _Span:
    """Union of sorted intervals."""
    first, reach = intervals[0]
    begin = first
    busy, longest = 0.0, 0.0
    for start, end in intervals[1:]:
        if start > reach:
            busy += reach - begin
            longest = max(longest, start - reach)
            begin = start
        reach = max(reach, end)
    busy += reach - begin
    return _Span(reach - first, busy, longest)
