"""Evidence from a server's own counters: made up for the rules, captured from real servers for the truth."""

import json
from dataclasses import replace

import pytest

from flows.commands.diagnose import model_of, slots_of
from paths import shared
from power_fakes import UUID, info
from tasks.client.metrics import from_counters, parse_counters, parse_loads
from tasks.power.baseline import VOLATILE, changes, compared_fields
from tasks.power.evidence import (
    Evidence,
    GpuEvidence,
    Job,
    gpu_evidence,
    graphs_disabled,
    service_evidence,
    speculation_of,
    stalled,
)
from tasks.power.verdict import Code, judge
from tasks.records import PowerSample, ServiceSample

CAPTURES = ("captures/sglang-0.5.11-h200", "captures/sglang-0.5.17-h200")


def sample(time_s: float, **changes) -> ServiceSample:
    values = {"running": 4, "queued": 0, "generated_tokens_total": 100.0, "gen_throughput_tok_s": 50.0, "kv_usage": 0.1}
    return ServiceSample(time_s, "s", **{**values, **changes})


def body(path: str) -> dict:
    return json.loads(shared(path).read_text())["body"]


def test_no_sign_of_progress_is_a_stall():
    assert stalled([sample(float(t)) for t in range(31)]) == 30.0


@pytest.mark.parametrize(
    "sign", ["generated_tokens_total", "prompt_tokens_total", "kv_usage", "gen_throughput_tok_s", "running"]
)
def test_any_sign_of_progress_ends_a_stall(sign):
    moving = [sample(float(t), **({sign: t + 1} if t <= 20 else {sign: 21})) for t in range(31)]
    assert stalled(moving) == 10.0


def test_a_finished_request_counter_alone_does_not_prove_a_stall():
    """generation_tokens_total stands still while long answers run; the throughput gauge shows that they do."""
    long_answers = [
        sample(float(t), generated_tokens_total=402.0, gen_throughput_tok_s=50.0 + t % 2) for t in range(60)
    ]
    assert stalled(long_answers) <= 1.0


def test_an_idle_server_cannot_stall():
    assert stalled([sample(float(t), running=0, gen_throughput_tok_s=0.0) for t in range(100)]) == 0.0
    assert stalled([]) == 0.0


def test_waiting_requests_without_a_running_one_can_stall():
    assert stalled([sample(float(t), running=0, queued=3) for t in range(31)]) == 30.0


def test_a_stall_begins_when_requests_come():
    idle = [sample(float(t), running=0) for t in range(50)]
    assert stalled([*idle, *(sample(50.0 + t) for t in range(6))]) == 5.0


def test_means_are_taken_while_requests_run():
    """spec_accept_length keeps its last value after the load ends and is missing before it begins."""
    samples = [
        sample(0.0, running=0, accept_length=None),
        sample(1.0, accept_length=3.0),
        sample(2.0, accept_length=2.8),
    ]
    samples.append(sample(3.0, running=0, accept_length=9.9))
    found = service_evidence(samples, arguments={"speculative_algorithm": "EAGLE"})
    assert found.accept_length == pytest.approx(2.9)
    assert (found.running, found.speculation) == (2.0, "on")


def test_the_clients_own_figures_are_preferred():
    found = service_evidence([sample(0.0), sample(1.0)], tok_s=400.0, accept_length=2.5, in_flight=8.0)
    assert (found.tok_s, found.accept_length, found.in_flight) == (400.0, 2.5, 8.0)


def test_rate_from_the_counter_where_there_is_no_gauge():
    samples = [sample(float(t), gen_throughput_tok_s=None, generated_tokens_total=100.0 * t) for t in range(5)]
    assert service_evidence(samples).tok_s == pytest.approx(100.0)


def test_retractions_are_what_the_counter_grew_by():
    assert service_evidence([sample(0.0, retracted_total=5.0), sample(1.0, retracted_total=9.0)]).retractions == 4.0


def test_speculation_is_only_denied_by_a_server_that_names_its_arguments():
    assert speculation_of({"speculative_algorithm": None}, None) == "off"
    assert speculation_of({"speculative_algorithm": "EAGLE"}, None) == "on"
    assert speculation_of({}, None) == "unknown"
    assert speculation_of({}, 2.4) == "on"


def test_graphs_are_judged_by_arguments():
    assert graphs_disabled({"disable_cuda_graph": True}) is True
    assert graphs_disabled({"disable_cuda_graph": False, "disable_decode_cuda_graph": True}) is True
    assert graphs_disabled({"disable_cuda_graph": False}) is False
    assert graphs_disabled({}) is None


def test_a_gpu_that_is_not_here_keeps_its_place_and_its_reason():
    found = gpu_evidence([PowerSample(1.0, UUID, power_average_w=400.0)], [info()], [UUID, "GPU-elsewhere"])
    assert found[0].stats is not None
    assert found[1].unsupported == "this GPU is not on this host"


@pytest.mark.parametrize("folder", CAPTURES)
def test_captured_servers_say_whether_they_speculate(folder):
    for name, wanted in (("tiny-mtp-eagle", "on"), ("tiny-plain", "off")):
        arguments = body(f"{folder}/{name}/server_info.json")
        assert speculation_of(arguments, None) == wanted
        assert graphs_disabled(arguments) is False
        assert model_of(arguments)
        assert slots_of(arguments)


@pytest.mark.parametrize("folder", CAPTURES)
def test_captured_plain_server_is_speculation_off_and_mtp_is_not(folder):
    """From the real answers alone, through the real parsers: /server_info, /v1/loads and /metrics under load."""
    for name, code in (("tiny-plain", Code.SPECULATION_OFF), ("tiny-mtp-eagle", Code.UNCALIBRATED)):
        fields = from_counters(parse_counters(shared(f"{folder}/{name}/metrics_busy.txt").read_text()))
        loads = parse_loads(body(f"{folder}/{name}/v1_loads_busy.json"))
        fields |= {key: value for key, value in loads.items() if value is not None}
        busy = ServiceSample(1.0, "s", **fields)
        service = service_evidence([busy], arguments=body(f"{folder}/{name}/server_info.json"))
        power = gpu_evidence([PowerSample(float(t), UUID, power_average_w=300.0) for t in range(9)], [info()], [UUID])
        judgement = judge(Evidence(Job("s", 48, mtp_wanted=True), service, power))
        assert judgement.code is code, judgement.summary


def test_captured_hang_is_a_stall():
    """A scheduler stopped for 24 s: /v1/loads went on answering with the same figures."""
    events = json.loads(shared("captures/sglang-0.5.17-h200/tiny-mtp-eagle/hang.json").read_text())["events"]
    frozen = next(e["body"] for e in events if e["what"] == "v1/loads, hung")
    seen = [ServiceSample(float(t), "s", **parse_loads(frozen)) for t in range(25)]
    service = service_evidence(seen)
    assert service.in_flight is not None
    assert service.in_flight >= 1
    assert service.stalled_s == 24.0
    idle = gpu_evidence([PowerSample(float(t), UUID, power_average_w=122.0) for t in range(25)], [info()], [UUID])
    gpus = tuple(replace(gpu, idle_w=120.0) for gpu in idle)
    assert isinstance(gpus[0], GpuEvidence)
    assert judge(Evidence(Job("s", 3), service, gpus)).code is Code.HUNG_PARKED


def test_two_starts_of_the_same_server_compare_equal():
    arguments = body("captures/sglang-0.5.17-h200/tiny-plain/server_info.json")
    again = {**arguments, "port": 30001, "random_seed": 7, "startup_time": {}, "internal_states": [], "status": "x"}
    first, second = (compared_fields([info()], a, "off", "0.5.17") for a in (arguments, again))
    assert changes(first, second) == {}
    assert set(first["arguments"]).isdisjoint(VOLATILE)


def test_mtp_against_plain_is_listed_by_argument():
    plain, mtp = (body(f"captures/sglang-0.5.17-h200/{n}/server_info.json") for n in ("tiny-plain", "tiny-mtp-eagle"))
    found = changes(compared_fields([info()], mtp, "on", "0.5.17"), compared_fields([info()], plain, "off", "0.5.17"))
    assert found["speculation"] == ("on", "off")
    assert found["--speculative-algorithm"] == ("EAGLE", None)
