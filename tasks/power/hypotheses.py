"""Why is the GPU starved? Each hypothesis of the tree supported, refuted or untested, with its evidence. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tasks.power import rules
from tasks.power.codes import NEXT_STEPS, Code
from tasks.power.evidence import Evidence
from tasks.power.kernels import Profile
from tasks.power.readings import Activity, GpuInfo

MUCH, LITTLE = 0.15, 0.05
"""Share of GPU time above which a cause is supported, and below which it is refuted."""
MEMORY_BOUND = 0.60
"""DRAM activity from which decoding is bound by reading weights and state (H200, 27B bf16, C=1: about 0.8)."""
SMALL_BATCH = 8


class Status(StrEnum):
    """What the evidence says about a hypothesis."""

    SUPPORTED = "supported"
    REFUTED = "refuted"
    UNTESTED = "untested"


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One possible cause."""

    name: str
    question: str
    status: Status
    evidence: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that was seen of one server under load."""

    evidence: Evidence
    infos: Sequence[GpuInfo] = ()
    activity: Sequence[Activity] = ()
    profile: Profile | None = None
    profile_problem: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    slots: int | None = None

    def mean(self, name: str) -> float | None:
        """Mean of one activity counter over GPUs and readings."""
        values = [value for a in self.activity if (value := getattr(a, name)) is not None]
        return sum(values) / len(values) if values else None


Found = tuple[Status, str]
Rule = Callable[[Observed], Found]


def examine(observed: Observed) -> list[Hypothesis]:
    """The whole tree, supported causes first."""
    found = []
    for name, question, rule, code in TREE:
        status, evidence = rule(observed)
        step = NEXT_STEPS[code][0] if status is Status.SUPPORTED else ""
        found.append(Hypothesis(name, question, status, evidence, step))
    return sorted(found, key=lambda h: h.status is not Status.SUPPORTED)


def power_limit(seen: Observed) -> Found:
    """At its enforced limit, or with a limit below the board's default?"""
    stats = seen.evidence.stats
    if not stats or stats[0].enforced_limit_w is None:
        return Status.UNTESTED, "power or its limit could not be read"
    worst = max(stats, key=lambda s: s.fraction_of_enforced_limit or 0.0)
    fraction, limit = worst.fraction_of_enforced_limit or 0.0, worst.enforced_limit_w or 0.0
    default = worst.default_limit_w
    lowered = default is not None and limit < default - rules.LIMIT_TOLERANCE_W
    text = f"{worst.mean_w:.0f} W of an enforced {limit:.0f} W ({fraction:.0%})"
    text += f", board default {default:.0f} W" if default is not None else ""
    text += f", power cap active {worst.sw_power_share:.0%} of the time" if worst.sw_power_share is not None else ""
    return (Status.SUPPORTED if fraction >= (0.9 if lowered else rules.AT_LIMIT) else Status.REFUTED), text


def throttling(seen: Observed) -> Found:
    """Slowed by temperature or power brake?"""
    if not seen.evidence.stats:
        return Status.UNTESTED, "throttle counters could not be read"
    hardware = max((s.hw_slowdown_share or 0.0 for s in seen.evidence.stats), default=0.0)
    software = max((s.sw_thermal_share or 0.0 for s in seen.evidence.stats), default=0.0)
    text = f"hardware slowdown {hardware:.1%}, thermal {software:.1%} of the window"
    bad = hardware > rules.HW_SHARE or software > rules.SW_THERMAL_SHARE
    return (Status.SUPPORTED if bad else Status.REFUTED), text


def mtp(seen: Observed) -> Found:
    """Is multi-token prediction off, or accepting nothing?"""
    service, least = seen.evidence.service, seen.evidence.job.min_accept_length
    if service.speculation == "off":
        return Status.SUPPORTED, "the server's arguments name no speculative algorithm"
    if service.speculation == "unknown":
        return Status.UNTESTED, "the server does not say whether it speculates"
    accept = service.accept_length
    if accept is None:
        return Status.UNTESTED, "speculation is on; no acceptance length was reported while requests ran"
    text = f"speculation is on, acceptance length {accept:.2f} (1.0 = nothing accepted)"
    return (Status.SUPPORTED if accept < least else Status.REFUTED), text


def batch(seen: Observed) -> Found:
    """Are too few requests running to use the GPU?"""
    service = seen.evidence.service
    if service.running is None:
        return Status.UNTESTED, "the server does not count its running requests"
    text = f"{service.running:.1f} running, {service.queued or 0:.1f} queued"
    text += f", {seen.slots} slots" if seen.slots else ""
    few = service.running <= SMALL_BATCH if not seen.slots else service.running < min(SMALL_BATCH, 0.5 * seen.slots)
    half_empty = seen.slots is not None and service.running < 0.5 * seen.slots and not service.queued
    if few or half_empty:
        return Status.SUPPORTED, f"{text}: every step reads all weights for few tokens"
    return Status.REFUTED, text


def memory(seen: Observed) -> Found:
    """Is KV or state memory what keeps requests waiting?"""
    service = seen.evidence.service
    if service.kv_usage is None and service.queued is None:
        return Status.UNTESTED, "the server reports neither memory use nor a queue"
    kv = "unknown" if service.kv_usage is None else f"{service.kv_usage:.0%}"
    text = f"KV use {kv}, {service.queued or 0:.1f} queued, {service.retractions:.0f} retractions"
    full = (service.kv_usage or 0.0) >= rules.FULL_KV or service.retractions > 0
    blocked = bool(service.queued and service.queued >= 1 and seen.slots and (service.running or 0) < 0.9 * seen.slots)
    return (Status.SUPPORTED if full or blocked else Status.REFUTED), text


def graphs(seen: Observed) -> Found:
    """Are decode steps launched kernel by kernel instead of as CUDA graphs?"""
    if seen.evidence.service.graphs_disabled:
        return Status.SUPPORTED, "the server's arguments disable CUDA graphs"
    profile = seen.profile
    if profile is not None and profile.graphs_used is not None:
        text = f"{profile.graph_launches} graph and {profile.kernel_launches} launches, {profile.kernels} kernels"
        alone = profile.kernel_launches / max(1, profile.kernels)
        return (Status.SUPPORTED if not profile.graphs_used or alone > 0.5 else Status.REFUTED), text
    if seen.evidence.service.graphs_disabled is False:
        return Status.UNTESTED, "not disabled by argument; only a profile shows whether this batch size is captured"
    return Status.UNTESTED, f"needs a profile{_why(seen)}"


def host(seen: Observed) -> Found:
    """Does the GPU wait for its host between kernels?"""
    profile, stats = seen.profile, seen.evidence.stats
    if profile is not None:
        text = (
            f"nothing runs on the GPU {profile.gaps:.0%} of the time, longest gap {profile.longest_gap_s * 1e3:.1f} ms"
        )
        return _by_share(profile.gaps, text)
    busy = seen.mean("sm")
    if busy is None and stats and stats[0].utilization is not None:
        idle = 1 - sum(s.utilization or 0.0 for s in stats) / len(stats)
        return _by_share(idle, f"no kernel in {idle:.0%} of the sampled time (utilisation)")
    if busy is not None:
        text = f"SMs active {busy:.0%} of the time (NVML GPM)"
        return (
            Status.REFUTED if busy > 0.9 else Status.UNTESTED
        ), f"{text}; only a profile tells gaps from small kernels"
    return Status.UNTESTED, f"needs a profile or counters{_why(seen)}"


def communication(seen: Observed) -> Found:
    """Does tensor parallelism spend its time in collectives?"""
    if seen.evidence.job.tensor_parallel == 1:
        return Status.REFUTED, "one GPU a server: there are no collectives"
    if seen.profile is not None:
        share = seen.profile.shares.get("all_reduce", 0.0)
        return _by_share(share, f"collectives take {share:.0%} of the GPU's time")
    rate = max((r for name in ("pcie_rx_mb_s", "nvlink_rx_mb_s") if (r := seen.mean(name)) is not None), default=None)
    if rate is None:
        return Status.UNTESTED, f"needs a profile or link counters{_why(seen)}"
    return (
        Status.SUPPORTED if rate > rules.LINK_BUSY_MB_S else Status.UNTESTED
    ), f"{rate:.0f} MB/s received over the link"


def pcie(seen: Observed) -> Found:
    """Do weights or KV travel over PCIe, or is the link narrower than it should be?"""
    offload = [n for n in ("cpu_offload_gb", "enable_hierarchical_cache", "enable_lmcache") if seen.arguments.get(n)]
    narrow = [
        f"{i.uuid[:12]} width x{i.pcie_width} of x{i.pcie_max_width}"
        for i in seen.infos
        if i.pcie_width and i.pcie_max_width and i.pcie_width < i.pcie_max_width
    ]
    rate = seen.mean("pcie_rx_mb_s")
    copies = None if seen.profile is None else seen.profile.shares.get("memcpy", 0.0)
    facts = [*(f"--{name.replace('_', '-')} is set" for name in offload), *narrow]
    facts += [f"{rate:.0f} MB/s received"] if rate is not None else []
    facts += [f"copies take {copies:.1%} of the GPU's time"] if copies is not None else []
    if not facts:
        return Status.UNTESTED, f"needs a profile or link counters{_why(seen)}"
    busy = (rate or 0.0) > rules.LINK_BUSY_MB_S or (copies or 0.0) > MUCH
    # A narrow link harms only what travels over it: without tensor parallelism or offload, weights stay on the card.
    harmed = bool(narrow) and (seen.evidence.job.tensor_parallel > 1 or bool(offload))
    return (Status.SUPPORTED if busy or harmed else Status.REFUTED), ", ".join(facts)


def precision(seen: Observed) -> Found:
    """Would fewer bytes a weight help (bound by memory in 16 bit), or does a low precision run emulated?"""
    quantization, dram, profile = seen.arguments.get("quantization"), seen.mean("dram"), seen.profile
    if profile is not None and profile.fallback > MUCH:
        return Status.SUPPORTED, f"dequantising or fallback kernels take {profile.fallback:.0%} of kernel time"
    if dram is None:
        return Status.UNTESTED, f"memory activity could not be read (quantisation: {quantization or 'none'})"
    text = f"DRAM active {dram:.0%}, quantisation {quantization or 'none'}"
    if dram >= MEMORY_BOUND and not quantization:
        return Status.SUPPORTED, f"{text}: bound by reading 16-bit weights and state; FP8 would change the data, though"
    return Status.REFUTED, text


def kernels(seen: Observed) -> Found:
    """Are the kernels made for this architecture?"""
    profile = seen.profile
    if profile is None:
        return Status.UNTESTED, f"needs a profile{_why(seen)}"
    newer = any((info.architecture or 0) >= 9 for info in seen.infos)  # NVML_DEVICE_ARCH_HOPPER
    text = f"{profile.old_gemm:.0%} of matrix time in kernels of Ampere or older, {profile.fallback:.0%} in fallbacks"
    tensor = seen.mean("tensor")
    text += f", tensor cores active {tensor:.0%}" if tensor is not None else ""
    bad = (newer and profile.old_gemm > MUCH) or profile.fallback > MUCH
    return (Status.SUPPORTED if bad else Status.REFUTED), text


def tenant(seen: Observed) -> Found:
    """Does somebody else use the GPU?"""
    counts = [info.processes for info in seen.infos if info.processes is not None]
    if not counts:
        return Status.UNTESTED, "processes on the GPU cannot be seen from here"
    text = f"{max(counts)} compute processes on a GPU"
    if max(counts) > 1:
        return Status.SUPPORTED, text
    # In a container only one's own processes are listed: a zero proves nothing.
    return (Status.REFUTED if max(counts) == 1 else Status.UNTESTED), text


def _by_share(share: float, text: str) -> Found:
    if share > MUCH:
        return Status.SUPPORTED, text
    return Status.REFUTED, text if share < LITTLE else f"{text}: some, not the main cause"


def _why(seen: Observed) -> str:
    return f" ({seen.profile_problem})" if seen.profile_problem else ""


TREE: tuple[tuple[str, str, Rule, Code], ...] = (
    ("power limit", "Is the card held by its power limit?", power_limit, Code.LIMIT_CHANGED),
    ("throttling", "Is it slowed by temperature or a power brake?", throttling, Code.HW_THROTTLED),
    ("MTP", "Is speculation off or accepting nothing?", mtp, Code.SPECULATION_OFF),
    ("batch", "Do too few requests run?", batch, Code.SCHEDULER_STARVED),
    ("memory", "Do requests wait for KV or state memory?", memory, Code.KV_FULL),
    ("CUDA graphs", "Are kernels launched one by one?", graphs, Code.LAUNCH_BOUND),
    ("host", "Does the GPU wait for the CPU?", host, Code.LAUNCH_BOUND),
    ("communication", "Is the time in collectives?", communication, Code.COMM_BOUND),
    ("PCIe", "Does data travel over PCIe?", pcie, Code.COMM_BOUND),
    ("precision", "Is it bound by bytes a weight, or emulated?", precision, Code.INEFFICIENT),
    ("kernels", "Are the kernels of this architecture?", kernels, Code.INEFFICIENT),
    ("tenants", "Does somebody else use the GPU?", tenant, Code.INEFFICIENT),
)
