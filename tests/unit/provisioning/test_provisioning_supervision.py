"""Health as progress, on recorded readings and by hand."""

import json
from datetime import datetime
from typing import Any

import pytest

from paths import shared
from tasks.client.metrics import parse_loads
from tasks.provisioning.supervision import HealthMonitor, State, backoff_s
from tasks.records import ServiceSample


def sample(time_s: float, **facts: Any) -> ServiceSample:
    base = {"running": 4, "queued": 0, "generated_tokens_total": time_s * 100, "heartbeat_age_s": 0.01}
    return ServiceSample(time_s, "s0", **{**base, **facts})


def test_a_busy_server_that_makes_tokens_is_healthy() -> None:
    monitor = HealthMonitor(60)
    assert all(monitor.observe(sample(t)).state is State.HEALTHY for t in range(600))


def test_an_idle_server_is_healthy_for_ever() -> None:
    monitor = HealthMonitor(60)
    idle = {"running": 0, "generated_tokens_total": 7.0}
    assert all(monitor.observe(sample(t, **idle)).state is State.HEALTHY for t in range(1000))


def test_requests_in_flight_without_a_token_mean_hung() -> None:
    monitor = HealthMonitor(60)
    states = [monitor.observe(sample(t, generated_tokens_total=500.0)).state for t in range(62)]
    assert states[59] is State.HEALTHY and states[60] is State.HUNG


def test_a_long_prefill_is_progress() -> None:
    monitor = HealthMonitor(60)
    for t in range(300):
        health = monitor.observe(sample(t, generated_tokens_total=5.0, prompt_tokens_total=float(t)))
        assert health.state is State.HEALTHY


def test_a_frozen_heartbeat_means_suspect_then_hung_even_when_idle() -> None:
    monitor = HealthMonitor(60)
    states = {t: monitor.observe(sample(t, running=0, heartbeat_age_s=float(t))).state for t in range(61)}
    assert (states[4], states[5], states[59], states[60]) == (State.HEALTHY, State.SUSPECT, State.SUSPECT, State.HUNG)


def test_kernels_that_compile_are_not_a_hang() -> None:
    # Recorded: 106.2 s without a heartbeat at the first sampled request. The default patience is 120 s.
    monitor = HealthMonitor(120)
    frozen = {"running": 0, "generated_tokens_total": 9.0}
    states = [monitor.observe(sample(t, heartbeat_age_s=float(t), **frozen)).state for t in range(107)]
    assert State.HUNG not in states
    assert monitor.observe(sample(108, generated_tokens_total=17.0)).state is State.HEALTHY


def test_a_version_that_counts_tokens_at_the_end_of_a_request_is_not_hung_while_it_works() -> None:
    # 0.5.11 has no heartbeat and no counter that moves in between; a thinking answer takes ten minutes.
    monitor = HealthMonitor(60)
    for t in range(600):
        old = sample(t, generated_tokens_total=0.0, heartbeat_age_s=None, kv_usage=t * 1e-4, gen_throughput_tok_s=50.0)
        assert monitor.observe(old).state is State.HEALTHY


def test_an_engine_that_answers_from_its_own_loop_is_judged_by_its_answers() -> None:
    monitor = HealthMonitor(120, unreachable_s=120, counters=False)
    still = {"generated_tokens_total": 7.0, "heartbeat_age_s": None}
    assert all(monitor.observe(sample(t, **still)).state is State.HEALTHY for t in range(500))
    states = [monitor.observe(sample(500 + t, alive=False)).state for t in range(121)]
    assert states[60] is State.SUSPECT and states[119] is State.UNREACHABLE


def test_silence_is_suspect_then_unreachable_and_an_answer_clears_it() -> None:
    monitor = HealthMonitor(60)
    monitor.observe(sample(0))
    silent = {"alive": False, "running": None, "generated_tokens_total": None, "heartbeat_age_s": None}
    assert monitor.observe(sample(5, **silent)).state is State.SUSPECT
    assert monitor.observe(sample(11, **silent)).state is State.UNREACHABLE
    assert monitor.observe(sample(12)).state is State.HEALTHY


def test_a_process_that_ended_is_dead_whatever_else_is_said() -> None:
    health = HealthMonitor(60).observe(sample(0), "ended with -9")
    assert health.state is State.DEAD and health.down and health.reason == "ended with -9"


def test_a_server_that_tells_nothing_is_healthy_while_it_answers() -> None:
    monitor = HealthMonitor(10)
    nothing = {"running": None, "queued": None, "generated_tokens_total": None, "heartbeat_age_s": None}
    assert all(monitor.observe(sample(t, **nothing)).state is State.HEALTHY for t in range(100))


def heartbeat(body: dict[str, Any]) -> tuple[float, ServiceSample]:
    fields = {name: value for name, value in parse_loads(body).items() if value is not None}
    now = datetime.fromisoformat(body["timestamp"]).timestamp()
    return now, ServiceSample(now, "s0", **fields)


def test_the_recorded_hang_is_seen_and_so_is_its_end() -> None:
    # SIGSTOP at 0.5 s, SIGCONT at 24.5 s; /v1/loads was read half a second in, 21.5 s in, and a second after.
    events = json.loads(shared("captures/sglang-0.5.17-h200/tiny-mtp-eagle/hang.json").read_text())["events"]
    readings = [heartbeat(event["body"])[1] for event in events if event["what"].startswith("v1/loads")]
    ages = [round(reading.heartbeat_age_s or 0, 2) for reading in readings]
    assert ages == [0.64, 21.64, 0.07]
    monitor = HealthMonitor(15)
    assert [monitor.observe(reading).state for reading in readings] == [State.HEALTHY, State.HUNG, State.HEALTHY]


@pytest.mark.parametrize(("restarts", "seconds"), [(0, 2), (1, 4), (5, 64), (20, 300)])
def test_backoff(restarts: int, seconds: float) -> None:
    assert backoff_s(restarts) == seconds
