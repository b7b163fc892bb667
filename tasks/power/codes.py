"""Every verdict by name, and what a person should look at next for each: the hypothesis tree in words."""

from enum import StrEnum


class Code(StrEnum):
    """Verdicts. POWER_LIMITED and FASTER are remarks on a healthy server, never accusations."""

    UNKNOWN = "UNKNOWN"
    UNCALIBRATED = "UNCALIBRATED"
    HEALTHY = "HEALTHY"
    HUNG_PARKED = "HUNG_PARKED"
    HUNG_SPINNING = "HUNG_SPINNING"
    HW_THROTTLED = "HW_THROTTLED"
    SPECULATION_OFF = "SPECULATION_OFF"
    ACCEPTANCE_COLLAPSE = "ACCEPTANCE_COLLAPSE"
    THERMAL_LIMITED = "THERMAL_LIMITED"
    LIMIT_CHANGED = "LIMIT_CHANGED"
    POWER_LIMITED = "POWER_LIMITED"
    KV_FULL = "KV_FULL"
    SCHEDULER_STARVED = "SCHEDULER_STARVED"
    LAUNCH_BOUND = "LAUNCH_BOUND"
    COMM_BOUND = "COMM_BOUND"
    STRAGGLER = "STRAGGLER"
    INEFFICIENT = "INEFFICIENT"
    WORKLOAD_DRIFT = "WORKLOAD_DRIFT"
    POWER_ANOMALY = "POWER_ANOMALY"
    FASTER = "FASTER"


NEXT_STEPS: dict[Code, tuple[str, ...]] = {
    Code.UNKNOWN: (
        "Judge by tokens/s alone: compare with a run of the same job on this hardware.",
        "If there is an NVIDIA GPU: is the driver visible here (nvidia-smi), is MIG off, is this the server's host?",
    ),
    Code.UNCALIBRATED: (
        "Nothing to do: a baseline is written once the run is known good, and the next run is judged.",
    ),
    Code.HUNG_PARKED: (
        "Server log: last `Decode batch` line, exceptions, `watchdog timeout`; dmesg for Xid errors.",
        "py-spy dump of the scheduler: is it waiting in a lock, in I/O or in state eviction?",
        "Restart the server; requests that it held are sent again.",
    ),
    Code.HUNG_SPINNING: (
        "TP > 1: one rank left a collective. py-spy dump of every rank; NCCL_DEBUG=INFO; check P2P and ACS settings.",
        "TP = 1: a kernel does not end. Which one? `regen diagnose`; then change the attention backend.",
        "Restart the server.",
    ),
    Code.HW_THROTTLED: (
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE: hardware slowdown, thermal slowdown or power brake?",
        "Power brake: supply or rack limit. Thermal: fans, airflow, a hot neighbour.",
        "Use another GPU until it is repaired.",
    ),
    Code.SPECULATION_OFF: (
        "Server arguments: --speculative-algorithm EAGLE with steps, top-k 1 and draft tokens = steps + 1?",
        "Does the checkpoint hold its `mtp.` tensors (15 keys for Qwen3.6-27B)? Quantised copies often drop them.",
        "Watts tell nothing here: MTP more than doubles tokens/s at equal or lower power.",
    ),
    Code.ACCEPTANCE_COLLAPSE: (
        "Is the draft head of this checkpoint loaded, and not of another revision or with dummy weights?",
        "Very long contexts and high temperatures lower acceptance; a template that the model does not know does too.",
        "Known engine defects: compare with another SGLang version, or with the radix cache off.",
    ),
    Code.THERMAL_LIMITED: (
        "Temperatures against the slowdown threshold (nvidia-smi -q -d TEMPERATURE): airflow, fans, room.",
        "A power limit somewhat lower often costs few tokens and ends the throttling.",
    ),
    Code.LIMIT_CHANGED: (
        "Who set it? nvidia-smi -q -d POWER shows requested, enforced and default limits; a reboot resets them.",
        "If it is meant to stay: delete this baseline, and the next good run writes a new one.",
    ),
    Code.POWER_LIMITED: ("Nothing: at saturation a card at its limit is what is wanted.",),
    Code.KV_FULL: (
        "Fewer requests in flight, or more room: --mem-fraction-static, shorter context, bf16 state, FP8 weights.",
        "Hybrid models: state slots run out long before KV (`mamba usage` in the log); `regen fit` plans them.",
    ),
    Code.SCHEDULER_STARVED: (
        "Compare effective_max_running_requests_per_dp in /server_info with the requests wanted.",
        "Many short prompts: prefill is host-bound; fewer, larger batches, or another server process.",
        "Queue empty as well: the client does not keep enough in flight; look at its CPU and its network.",
    ),
    Code.LAUNCH_BOUND: (
        "CUDA graphs: is `cuda graph: True` in the decode lines, and is the batch size captured?",
        "Host CPU: a saturated or slow core in the scheduler, a debug setting, a noisy neighbour.",
        "`regen diagnose` shows the share of time in which the GPU runs nothing.",
    ),
    Code.COMM_BOUND: (
        "All-reduce over PCIe: are custom all-reduce and P2P on (--disable-custom-all-reduce absent)?",
        "PCIe generation and width as trained (nvidia-smi -q -d PCIE), NVLink up (nvidia-smi nvlink -s).",
        "If the model fits one GPU, run one server a GPU instead of tensor parallelism.",
    ),
    Code.STRAGGLER: (
        "Swap the GPU out of the group. Clock, temperature, PCIe width and other processes of the odd one?",
        "All others wait for it in every layer.",
    ),
    Code.INEFFICIENT: (
        "Kernels of the right architecture? A fallback (emulated FP8, generic attention) burns power for fewer tokens.",
        "Another tenant on the GPU (nvidia-smi, compute processes)?",
        "Retractions recompute work; speculation with too many steps at high concurrency does too.",
    ),
    Code.WORKLOAD_DRIFT: (
        "Longer contexts, another template or thinking mode than the baseline's? Compare prompt and output lengths.",
        "If this is the workload from now on, recalibrate.",
    ),
    Code.POWER_ANOMALY: (
        "Tokens are as expected, so go on. Sensor, firmware, fan or temperature differ: compare the energy counter.",
    ),
    Code.FASTER: ("Faster than the baseline: recalibrate, so that a later slow-down is not taken for normal.",),
    Code.HEALTHY: (),
}
