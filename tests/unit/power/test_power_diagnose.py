"""Kernel shares from traces, and the hypothesis tree, up to the command line."""

import gzip
import json
from dataclasses import replace

import pytest
from aiohttp import web

from flows.cli import run
from power_fakes import UUID, FakeSensor, info
from simulator.fleet import SimFleet
from simulator.settings import SimSettings
from tasks.errors import ServerError
from tasks.power.diagnosis import diagnose, write_diagnosis
from tasks.power.evidence import Evidence, GpuEvidence, Job, ServiceEvidence
from tasks.power.hypotheses import TREE, Observed, Status, examine
from tasks.power.kernels import Profile, category, read_trace, summarize_trace
from tasks.power.profiling import record_trace, summarize_files
from tasks.power.readings import Activity
from tasks.power.rig import Rig
from tasks.power.sampler import PowerSampler
from tasks.power.settings import PowerSettings
from tasks.power.statistics import summarize
from tasks.records import Capabilities, PowerSample, Server

NAMES = {
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>": "attention",
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<false, float>": "attention",
    "_fwd_grouped_kernel_stage1": "attention",
    "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<512u>": "sampling",
    "void at::native::cunn_SoftMaxForward<4, float>": "sampling",
    "fused_recurrent_gated_delta_rule_update_fwd_kernel": "gated_delta",
    "_causal_conv1d_update_kernel": "gated_delta",
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "gated_delta",
    "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN": "gemm",
    "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize96x64": "gemm",
    "fused_moe_kernel": "moe",
    "void topkGatingSoftmax<float, 8, 128>": "moe",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "all_reduce",
    "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>": "all_reduce",
    "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>": "elementwise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>": "elementwise",
    "something_new": "other",
}


def kernel(name: str, ts: float, dur: float, device: int = 0, cat: str = "kernel") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"device": device}}


def trace(*, graphs=True, gap_us=10.0, collectives=0.0) -> list[dict]:
    """Twenty decode steps of 1 ms: 60 % matrices, 20 % gated delta, 10 % attention, the rest gaps and collectives."""
    events: list[dict] = [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "cpu_op", "name": "x", "ts": 0, "dur": 9},
    ]
    at = 0.0
    for _ in range(20):
        launch = "cudaGraphLaunch" if graphs else "cudaLaunchKernel"
        events += [{"ph": "X", "cat": "cuda_runtime", "name": launch, "ts": at, "dur": 5.0}] * (1 if graphs else 4)
        for name, dur in (
            ("nvjet_sm90_tst", 600.0),
            ("fused_recurrent_gated_delta_rule", 200.0),
            ("flash::FlashAttnFwdSm90", 100.0),
            ("nccl_AllReduce", collectives),
            ("flashinfer::sampling::Top", 50.0),
        ):
            if dur:
                events.append(kernel(name, at, dur))
                at += dur
        at += gap_us
    return events


@pytest.mark.parametrize(("name", "wanted"), NAMES.items(), ids=range(len(NAMES)))
def test_kernels_are_sorted_by_their_work(name, wanted):
    assert category(name) == wanted


def test_copies_are_their_own_work():
    assert category("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy") == "memcpy"


def test_shares_and_gaps_add_up():
    profile = summarize_trace(trace(gap_us=50.0))
    assert profile is not None
    assert sum(profile.shares.values()) + profile.gaps == pytest.approx(1.0)
    assert profile.gaps == pytest.approx(0.05, abs=0.003)
    assert profile.shares["gemm"] == pytest.approx(0.60, abs=0.01)
    assert profile.shares["gated_delta"] == pytest.approx(0.20, abs=0.01)
    assert profile.graphs_used
    assert profile.longest_gap_s == pytest.approx(50e-6)
    assert list(profile.shares) == sorted(profile.shares, key=lambda n: -profile.shares[n])


def test_overlapping_streams_do_not_count_twice():
    profile = summarize_trace([kernel("gemm", 0.0, 100.0), kernel("nccl", 50.0, 100.0), kernel("gemm", 200.0, 50.0)])
    assert profile is not None
    assert profile.gaps == pytest.approx(0.2)
    assert profile.shares["gemm"] == pytest.approx(150 / 250 * 0.8)


def test_devices_are_averaged():
    profile = summarize_trace([kernel("gemm", 0, 100, 0), kernel("gemm", 0, 50, 1), kernel("gemm", 90, 10, 1)])
    assert profile is not None
    assert profile.devices == 2
    assert profile.gaps == pytest.approx(0.2)


def test_a_trace_without_gpu_work_is_none():
    assert summarize_trace([{"ph": "X", "cat": "cpu_op", "name": "x", "ts": 0, "dur": 1}]) is None


def test_a_damaged_trace_is_named(tmp_path):
    path = tmp_path / "1-TP-0.trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [')[:-4])
    with pytest.raises(ServerError, match="not a whole profiler trace"):
        read_trace(path)


def write_trace(path, events) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def test_ranks_are_summed(tmp_path):
    for rank in range(2):
        write_trace(tmp_path / f"1-TP-{rank}.trace.json.gz", trace())
    profile = summarize_files(sorted(tmp_path.iterdir()))
    assert profile is not None
    assert profile.devices == 2
    assert profile.shares["gemm"] == pytest.approx(0.62, abs=0.02)


# The tree.

STATS = {"enforced_limit_w": 700.0, "default_limit_w": 700.0, "utilization": 0.95, "sm_clock_mhz": 1980.0}


def observed(watts=480.0, service=None, *, activity=None, stats=None, **changes) -> Observed:
    samples = [
        PowerSample(time_s=i / 5, gpu_uuid=UUID, power_average_w=watts, **{**STATS, **(stats or {})}) for i in range(60)
    ]
    values = {
        "window_s": 10.0,
        "running": 32.0,
        "queued": 0.0,
        "kv_usage": 0.3,
        "accept_length": 3.0,
        "speculation": "on",
        "graphs_disabled": False,
    }
    evidence = Evidence(
        changes.pop("job", Job("s", 32, mtp_wanted=True)),
        ServiceEvidence(**{**values, **(service or {})}),
        (GpuEvidence(UUID, summarize(samples)),),
    )
    counters = {"sm": 0.95, "dram": 0.4, "tensor": 0.3, "pcie_rx_mb_s": 50.0, **(activity or {})}
    defaults = {
        "infos": [replace(info(), processes=1, architecture=9, pcie_width=16, pcie_max_width=16)],
        "activity": [Activity(UUID, 1.0, **counters)],
        "profile": summarize_trace(trace()),
        "slots": 32,
    }
    return Observed(evidence, **{**defaults, **changes})


def status(found: Observed, name: str) -> Status:
    return next(h for h in examine(found) if h.name == name).status


def test_a_sound_server_has_no_supported_cause():
    assert [h.name for h in examine(observed()) if h.status is Status.SUPPORTED] == []
    assert all(h.evidence for h in examine(observed()))


@pytest.mark.parametrize(
    ("cause", "found"),
    [
        ("power limit", observed(696.0)),
        ("power limit", observed(380.0, stats={"enforced_limit_w": 400.0})),
        ("throttling", observed(stats={"event_reasons": 0x40})),
        ("MTP", observed(service={"speculation": "off", "accept_length": None})),
        ("MTP", observed(service={"accept_length": 1.0})),
        ("batch", observed(service={"running": 3.0})),
        ("memory", observed(service={"kv_usage": 0.99})),
        ("memory", observed(service={"running": 20.0, "queued": 44.0})),
        ("CUDA graphs", observed(service={"graphs_disabled": True})),
        ("CUDA graphs", observed(profile=summarize_trace(trace(graphs=False)))),
        ("host", observed(profile=summarize_trace(trace(gap_us=700.0)))),
        ("communication", observed(job=Job("s", 32, 2), profile=summarize_trace(trace(collectives=400.0)))),
        ("PCIe", observed(activity={"pcie_rx_mb_s": 20_000.0})),
        ("PCIe", observed(arguments={"cpu_offload_gb": 20}, infos=[replace(info(), pcie_width=8, pcie_max_width=16)])),
        ("precision", observed(activity={"dram": 0.8})),
        ("kernels", observed(profile=summarize_trace([kernel("sm80_xmma_gemm", i * 100.0, 90.0) for i in range(9)]))),
        ("tenants", observed(infos=[replace(info(), processes=2)])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_cause_is_supported_by_its_evidence(cause, found):
    supported = next(h for h in examine(found) if h.name == cause)
    assert supported.status is Status.SUPPORTED, supported.evidence
    assert supported.next_step
    assert examine(found)[0].status is Status.SUPPORTED


def test_without_a_profile_the_tree_says_what_it_could_not_test():
    found = observed(profile=None, profile_problem="answered 404")
    assert {h.name for h in examine(found)} == {name for name, *_ in TREE}
    assert status(found, "kernels") is Status.UNTESTED
    assert "404" in next(h for h in examine(found) if h.name == "kernels").evidence


def test_without_any_counters_nothing_is_claimed():
    blind = Observed(Evidence(Job("s", 1, 2), ServiceEvidence(0.0)))
    assert {h.status for h in examine(blind)} == {Status.UNTESTED}


def test_a_narrow_link_alone_is_no_cause():
    narrow = observed(infos=[replace(info(), processes=1, pcie_width=8, pcie_max_width=16)])
    assert status(narrow, "PCIe") is Status.REFUTED


# Against servers.


@pytest.fixture
async def profiled(tmp_path):
    """A server that writes a trace when asked, like SGLang; `refuse` answers 500 as when one is under way."""
    state = {"refuse": False, "bodies": []}

    async def start(request: web.Request) -> web.Response:
        body = await request.json()
        state["bodies"].append(body)
        if state["refuse"]:
            return web.Response(status=500, text="Profiling is already in progress")
        write_trace(tmp_path.__class__(body["output_dir"]) / "17-TP-0.trace.json.gz", trace(gap_us=600.0))
        return web.Response(text="Start profiling.\n")

    async def loads(_: web.Request) -> web.Response:
        load = {"num_running_reqs": 8, "num_waiting_reqs": 0, "token_usage": 0.1, "gen_throughput": 400.0, "dp_rank": 0}
        return web.json_response({"timestamp": 1.0, "loads": [{**load, "timestamp": 1.0}]})

    app = web.Application()
    app.router.add_post("/start_profile", start)
    app.router.add_get("/v1/loads", loads)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    can = Capabilities(loads=True)
    arguments = {"speculative_algorithm": "EAGLE", "disable_cuda_graph": False, "tp_size": 1}
    yield Server("s", f"http://127.0.0.1:{port}", "m", "sglang", "0.5.17", capabilities=can, arguments=arguments), state
    await runner.cleanup()


async def test_a_trace_is_asked_for_and_read(profiled, tmp_path):
    server, state = profiled
    paths = await record_trace(server, tmp_path / "trace", steps=7, timeout_s=10)
    assert [path.name for path in paths] == ["17-TP-0.trace.json.gz"]
    body = state["bodies"][0]
    assert (body["num_steps"], body["activities"], body["with_stack"]) == (7, ["GPU"], False)


async def test_a_refused_profile_is_an_error_that_says_why(profiled, tmp_path):
    server, state = profiled
    state["refuse"] = True
    with pytest.raises(ServerError, match="already in progress"):
        await record_trace(server, tmp_path / "trace", timeout_s=5)


async def test_diagnosis_of_a_starved_server(profiled, tmp_path):
    server, _ = profiled
    with PowerSampler(None, FakeSensor(lambda _: 300.0), hz=20) as sampler:
        rig = Rig([server], sampler, PowerSettings(), mtp_wanted=True)
        found = await diagnose(rig, server, folder=tmp_path / "trace", seconds=1.0, load=0, profile_timeout_s=10)
    assert "host" in found.supported
    assert isinstance(found.profile, Profile)
    assert found.profile.gaps > 0.3
    assert found.activity["sm"] == pytest.approx(0.8)
    assert found.own_load == 0
    write_diagnosis(found, tmp_path / "diagnosis.json")
    assert json.loads((tmp_path / "diagnosis.json").read_text())["supported"] == found.supported


async def test_diagnosis_without_profile_and_without_nvidia(profiled, tmp_path):
    server, state = profiled
    state["refuse"] = True
    with PowerSampler(None, None) as sampler:
        rig = Rig([server], sampler, PowerSettings())
        found = await diagnose(rig, server, folder=tmp_path / "t", seconds=1.0, load=0)
    assert found.profile is None
    assert "already in progress" in found.profile_problem
    assert found.judgement.code.value == "UNKNOWN"


def test_the_command_examines_a_running_server(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with SimFleet(1, SimSettings(max_running=8, accept_length=None)) as fleet:
        url = fleet.records()[0].base_url
        status_code = run(["diagnose", "--url", url, "--seconds", "1", "--load", "4", "--out", str(tmp_path)])
    assert status_code == 0
    payload = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert "MTP" in payload["supported"]
    assert payload["own_load"] == 4
    assert payload["evidence"]["tok_s"] > 100
    assert "404" in payload["profile_problem"]
    assert (tmp_path / "diagnosis.json").exists()


def test_the_command_names_a_server_that_is_not_there(tmp_path, capsys):
    assert run(["diagnose", "--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 4
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["kind"] == "ServerError"
