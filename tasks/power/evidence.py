"""What a verdict is made of: one server's job, its own counters, its GPUs and what it did when it was known good."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tasks.power.readings import Activity, GpuInfo
from tasks.power.statistics import PowerStats, by_gpu, summarize
from tasks.records import PowerSample, Server, ServiceSample

Speculation = Literal["on", "off", "unknown"]


@dataclass(frozen=True, slots=True)
class Job:
    """What this server is meant to do. `concurrency` is requests in flight wanted (C)."""

    server: str
    concurrency: int
    tensor_parallel: int = 1
    mtp_wanted: bool = False
    min_accept_length: float = 1.2
    dp_attention: bool = False
    workload: Literal["probe", "natural"] = "probe"


@dataclass(frozen=True, slots=True)
class GpuEvidence:
    """One GPU over the window. `unsupported` says why its watts mean nothing here."""

    uuid: str
    stats: PowerStats | None
    idle_w: float | None = None
    activity: Activity | None = None
    unsupported: str | None = None


@dataclass(frozen=True, slots=True)
class ServiceEvidence:
    """The server over the window. None where it does not tell; means are over the window's readings.

    `stalled_s` is how long no sign of progress was seen while requests were in flight. `tok_s` is output tokens a
    second, exact from the answers where the client measured it.
    """

    window_s: float
    in_flight: float | None = None
    running: float | None = None
    queued: float | None = None
    kv_usage: float | None = None
    retractions: float = 0.0
    tok_s: float | None = None
    accept_length: float | None = None
    speculation: Speculation = "unknown"
    graphs_disabled: bool | None = None
    stalled_s: float = 0.0
    heartbeat_age_s: float | None = None
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Expected:
    """Known-good values: per-GPU watts, tokens per second, and the half-width of the band around each (relative)."""

    tok_s: float
    power_w: float | None
    tok_s_band: float
    power_band: float
    j_per_token: float | None = None
    accept_length: float | None = None
    idle_w: float | None = None
    enforced_limit_w: float | None = None
    speculation: Speculation = "unknown"
    changed: Mapping[str, tuple[Any, Any]] | None = None
    same_board: bool = True


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything `judge` may look at."""

    job: Job
    service: ServiceEvidence
    gpus: tuple[GpuEvidence, ...] = ()
    expected: Expected | None = None

    @property
    def stats(self) -> list[PowerStats]:
        """Statistics of the GPUs whose power means something."""
        return [gpu.stats for gpu in self.gpus if gpu.stats is not None and gpu.unsupported is None]

    @property
    def power_w(self) -> float | None:
        """Mean watts of one GPU."""
        return statistics.fmean(s.mean_w for s in self.stats) if self.stats else None

    @property
    def j_per_token(self) -> float | None:
        """Joules of all GPUs together ÷ output tokens, over the window."""
        if not self.stats or not self.service.tok_s:
            return None
        return sum(s.mean_w for s in self.stats) / self.service.tok_s

    @property
    def idle_w(self) -> float | None:
        """Watts of one GPU with the model loaded and no request: measured before, else the baseline's."""
        measured = [gpu.idle_w for gpu in self.gpus if gpu.idle_w is not None]
        return statistics.fmean(measured) if measured else (self.expected.idle_w if self.expected else None)


def gpu_evidence(
    samples: Sequence[PowerSample],
    infos: Sequence[GpuInfo],
    uuids: Sequence[str],
    *,
    idle_w: Mapping[str, float] | None = None,
    activity: Mapping[str, Activity] | None = None,
) -> tuple[GpuEvidence, ...]:
    """Evidence of the GPUs `uuids`, in that order; GPUs without readings keep a place, with the reason."""
    split, described = by_gpu(samples), {info.uuid: info for info in infos}
    found = []
    for uuid in uuids:
        info, stats = described.get(uuid), summarize(split.get(uuid, []))
        unsupported = info.unsupported if info else ("this GPU is not on this host" if infos else None)
        found.append(
            GpuEvidence(
                uuid=uuid,
                stats=stats,
                idle_w=(idle_w or {}).get(uuid),
                activity=(activity or {}).get(uuid),
                unsupported=unsupported if stats is None or unsupported else None,
            )
        )
    return tuple(found)


def service_evidence(
    samples: Sequence[ServiceSample],
    *,
    arguments: Mapping[str, Any] | None = None,
    in_flight: float | None = None,
    tok_s: float | None = None,
    accept_length: float | None = None,
    idle_since_s: float | None = None,
) -> ServiceEvidence:
    """Sum up one server's own counters, in time order. `tok_s`, `accept_length`: measured by the client, preferred.

    `generation_tokens_total` grows only when a request ends (seen on 0.5.11 and 0.5.17), so it gives a rate only where
    nothing better is there and never alone proves a stall; see `stalled`.
    """
    busy = [s for s in samples if s.running]
    window_s = samples[-1].time_s - samples[0].time_s if len(samples) > 1 else 0.0
    accept = accept_length if accept_length is not None else _mean([s.accept_length for s in busy])
    return ServiceEvidence(
        window_s=window_s,
        in_flight=in_flight if in_flight is not None else _mean([_in_flight(s) for s in samples]),
        running=_mean([s.running for s in samples]),
        queued=_mean([s.queued for s in samples]),
        kv_usage=_mean([s.kv_usage for s in samples]),
        retractions=_grown([s.retracted_total for s in samples]),
        tok_s=tok_s if tok_s is not None else _rate(samples),
        accept_length=accept,
        speculation=speculation_of(arguments or {}, accept),
        graphs_disabled=graphs_disabled(arguments or {}),
        stalled_s=stalled(samples, since_s=idle_since_s),
        heartbeat_age_s=samples[-1].heartbeat_age_s if samples else None,
        alive=samples[-1].alive if samples else True,
    )


def speculation_of(arguments: Mapping[str, Any], accept_length: float | None) -> Speculation:
    """Whether the server speculates: its own arguments decide, else an acceptance length above 1 shows that it does.

    Only a server that names its arguments can be found "off": other engines are "unknown", never accused.
    """
    if "speculative_algorithm" in arguments:
        return "on" if arguments["speculative_algorithm"] else "off"
    return "on" if accept_length is not None and accept_length > 1.0 else "unknown"


def graphs_disabled(arguments: Mapping[str, Any]) -> bool | None:
    """Whether decoding runs without CUDA graphs, by the server's arguments; None when it names none of them.

    The gauge `sglang:is_cuda_graph` is not used: it read 0 on both captured versions while the log said `cuda graph:
    True` for every decode batch.
    """
    names = ("disable_cuda_graph", "disable_decode_cuda_graph")
    known = [bool(arguments[name]) for name in names if arguments.get(name) is not None]
    return any(known) if known else None


def stalled(samples: Sequence[ServiceSample], since_s: float | None = None) -> float:
    """Seconds up to the last reading without any sign of progress, while the server had requests.

    Signs: a token, prompt or retraction counter that grew, KV use, generation throughput or the number of running
    requests that changed. A scheduler that prefills a long prompt or compiles a kernel shows none of them and is slow,
    not hung: that is what the 20 s and the warm-up request are for.
    """
    if not samples:
        return 0.0
    last_sign_s = samples[0].time_s if since_s is None else max(samples[0].time_s, since_s)
    before = samples[0]
    for sample in samples[1:]:
        if _signs(sample) != _signs(before) or not _in_flight(sample):
            last_sign_s = sample.time_s
        before = sample
    return max(0.0, samples[-1].time_s - last_sign_s) if _in_flight(samples[-1]) else 0.0


def _signs(sample: ServiceSample) -> tuple[Any, ...]:
    return (
        sample.generated_tokens_total,
        sample.prompt_tokens_total,
        sample.retracted_total,
        sample.kv_usage,
        sample.gen_throughput_tok_s,
        sample.running,
    )


def _in_flight(sample: ServiceSample) -> float | None:
    if sample.running is None and sample.queued is None:
        return None
    return (sample.running or 0) + (sample.queued or 0)


def _rate(samples: Sequence[ServiceSample]) -> float | None:
    """Tokens a second: the server's own gauge averaged over busy readings, else its counter's growth."""
    gauge = [s.gen_throughput_tok_s for s in samples if s.running and s.gen_throughput_tok_s]
    if gauge:
        return _mean(gauge)
    counted = [(s.time_s, s.generated_tokens_total) for s in samples if s.generated_tokens_total is not None]
    if len(counted) < 2 or counted[-1][0] <= counted[0][0]:
        return None
    return (counted[-1][1] - counted[0][1]) / (counted[-1][0] - counted[0][0])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _grown(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return max(0.0, known[-1] - known[0]) if len(known) > 1 else 0.0


def gpus_of(server: Server, infos: Sequence[GpuInfo], servers: int = 1) -> tuple[str, ...]:
    """UUIDs of the GPUs behind `server` on this host: as it was started, or all when it is alone here. Else none."""
    here = {info.uuid for info in infos}
    if server.gpu_uuids:
        return tuple(uuid for uuid in server.gpu_uuids if uuid in here)
    local = any(f"//{host}" in server.base_url for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0"))
    if not local or servers > 1:
        return ()
    wanted = int(server.arguments.get("tp_size") or 1) * int(server.arguments.get("dp_size") or 1)
    first = int(server.arguments.get("base_gpu_id") or 0)
    chosen = [info.uuid for info in sorted(infos, key=lambda i: i.index)]
    return tuple(chosen[first : first + wanted]) or tuple(chosen)
