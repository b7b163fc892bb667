"""What a gate needs to know about the fleet: its servers, its job, and how to reach sensors and counters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.client.metrics import read_service_sample
from tasks.power.baseline import JobKey, sku_of
from tasks.power.evidence import Evidence, Expected, Job, gpu_evidence, gpus_of, service_evidence
from tasks.power.probe import ClientFactory, ProbeResult, ReadService, client_for, workload_id
from tasks.power.readings import GpuInfo
from tasks.power.sampler import PowerSampler
from tasks.power.settings import PowerSettings
from tasks.power.statistics import RULES, WindowRules, by_gpu, summarize
from tasks.records import PowerSample, Server, ServiceSample


@dataclass(frozen=True, slots=True)
class Rig:
    """The fleet under judgement. `sampler` runs throughout; without NVIDIA it knows no GPU."""

    servers: Sequence[Server]
    sampler: PowerSampler
    settings: PowerSettings
    model_digest: str = ""
    mtp_wanted: bool = False
    min_accept_length: float = 1.2
    read_service: ReadService = read_service_sample
    client_factory: ClientFactory = client_for
    rules: WindowRules = RULES

    @property
    def infos(self) -> list[GpuInfo]:
        """This host's GPUs."""
        return self.sampler.gpus

    def gpus(self, server: Server) -> tuple[str, ...]:
        """UUIDs behind `server`."""
        return gpus_of(server, self.infos, len(self.servers))

    def described(self, server: Server) -> list[GpuInfo]:
        """The GPUs behind `server`, as the driver describes them."""
        wanted = set(self.gpus(server))
        return [info for info in self.infos if info.uuid in wanted]

    @property
    def can_judge(self) -> bool:
        """Whether power can be read for at least one server."""
        return any(info.unsupported is None for server in self.servers for info in self.described(server))

    def job(self, server: Server, concurrency: int) -> Job:
        """What `server` is meant to do."""
        arguments = server.arguments
        return Job(
            server=server.name,
            concurrency=concurrency,
            tensor_parallel=int(arguments.get("tp_size") or 1),
            mtp_wanted=self.mtp_wanted,
            min_accept_length=self.min_accept_length,
            dp_attention=bool(arguments.get("enable_dp_attention")),
        )

    def key(self, server: Server, concurrency: int) -> JobKey:
        """The baseline key of `server`'s job at `concurrency`."""
        workload = workload_id(self.settings.probe_output_tokens)
        return JobKey(sku_of(self.described(server)), self.model_digest, workload, concurrency)

    def evidence(
        self,
        server: Server,
        probe: ProbeResult,
        span: tuple[float, float],
        idle_w: Mapping[str, float],
        expected: Expected | None = None,
    ) -> Evidence:
        """What is known of `server` in `span` (Unix seconds) of its probe."""
        inside = [s for s in probe.service if span[0] <= s.time_s <= span[1]]
        service = service_evidence(
            inside,
            arguments=server.arguments,
            in_flight=probe.in_flight(),
            tok_s=probe.tok_s(*span),
            accept_length=probe.accept_length,
        )
        return Evidence(
            job=self.job(server, probe.concurrency),
            service=service,
            gpus=gpu_evidence(self.sampler.since(*span), self.infos, self.gpus(server), idle_w=idle_w),
            expected=expected,
        )


def idle_watts(samples: Sequence[PowerSample]) -> dict[str, float]:
    """Mean watts of each GPU over an idle window."""
    found = {uuid: summarize(own) for uuid, own in by_gpu(samples).items()}
    return {uuid: stats.mean_w for uuid, stats in found.items() if stats is not None}


def at_rest(sample: ServiceSample) -> bool:
    """Whether the server said that it has nothing to do."""
    return not sample.running and not sample.queued
