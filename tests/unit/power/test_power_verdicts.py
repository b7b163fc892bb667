"""One test for each verdict of the table, and one for each false positive that the research names."""

from dataclasses import replace

import pytest

from tasks.power.codes import NEXT_STEPS, Code
from tasks.power.evidence import Evidence, Expected, GpuEvidence, Job, ServiceEvidence
from tasks.power.statistics import PowerStats
from tasks.power.verdict import judge
from tasks.records import Level

IDLE_W = 120.0
LIMIT_W = 700.0


def stats(uuid="GPU-0", **changes) -> PowerStats:
    """An H200 at C=32 with MTP, as measured: 483 W of 700 W."""
    values = {
        "gpu_uuid": uuid,
        "start_s": 0.0,
        "window_s": 45.0,
        "samples": 225,
        "distinct": 225,
        "coverage": 0.5,
        "source": "average",
        "mean_w": 483.0,
        "p10_w": 470.0,
        "p90_w": 500.0,
        "max_w": 510.0,
        "sm_clock_mhz": 1980.0,
        "temperature_c": 48.0,
        "utilization": 0.63,
        "enforced_limit_w": LIMIT_W,
        "default_limit_w": LIMIT_W,
        "sw_power_share": 0.0,
        "sw_thermal_share": 0.0,
        "hw_thermal_share": 0.0,
        "hw_brake_share": 0.0,
    }
    return PowerStats(**{**values, **changes})


def gpu(uuid="GPU-0", *, unsupported=None, **changes) -> GpuEvidence:
    return GpuEvidence(uuid, stats(uuid, **changes), idle_w=IDLE_W, unsupported=unsupported)


SERVICE = ServiceEvidence(
    window_s=45.0,
    in_flight=32.0,
    running=32.0,
    queued=0.0,
    kv_usage=0.4,
    tok_s=1536.0,
    accept_length=3.0,
    speculation="on",
    graphs_disabled=False,
)
EXPECTED = Expected(
    tok_s=1536.0,
    power_w=483.0,
    tok_s_band=0.08,
    power_band=0.08,
    j_per_token=0.314,
    accept_length=3.0,
    idle_w=IDLE_W,
    enforced_limit_w=LIMIT_W,
    speculation="on",
)
JOB = Job("s0", 32, mtp_wanted=True)


def evidence(*gpus, job=JOB, expected=EXPECTED, **service) -> Evidence:
    return Evidence(job, replace(SERVICE, **service), gpus or (gpu(),), expected)


def verdict(found: Evidence) -> tuple[Code, Level]:
    judgement = judge(found)
    return judgement.code, judgement.level


def test_healthy():
    judgement = judge(evidence())
    assert (judgement.code, judgement.level) == (Code.HEALTHY, Level.OK)
    assert all(e.passed for e in judgement.expectations)
    assert judgement.evidence["j_per_token"] == pytest.approx(483 / 1536)


def test_unknown_without_a_sensor_passes_with_its_reason():
    judgement = judge(Evidence(JOB, SERVICE, (), EXPECTED))
    assert (judgement.code, judgement.level) == (Code.UNKNOWN, Level.UNKNOWN)
    assert "no NVIDIA GPU" in judgement.summary


def test_hung_parked():
    stuck = evidence(gpu(mean_w=123.0, utilization=0.0), stalled_s=30.0, tok_s=0.0, expected=None)
    assert verdict(stuck) == (Code.HUNG_PARKED, Level.CRITICAL)
    assert judge(stuck).hung


def test_hung_spinning():
    stuck = evidence(gpu(mean_w=310.0, utilization=1.0), stalled_s=30.0, tok_s=0.0, expected=None)
    assert verdict(stuck) == (Code.HUNG_SPINNING, Level.CRITICAL)


def test_hardware_throttled_needs_tokens_below_the_band():
    hot = gpu(hw_thermal_share=0.2, sm_clock_mhz=990.0)
    assert verdict(evidence(hot, tok_s=900.0)) == (Code.HW_THROTTLED, Level.CRITICAL)
    assert verdict(evidence(hot)) == (Code.HW_THROTTLED, Level.WARNING)
    assert verdict(evidence(hot, expected=None)) == (Code.HW_THROTTLED, Level.CRITICAL)


def test_power_brake_from_sampled_bits_where_there_are_no_counters():
    braked = gpu(hw_thermal_share=None, hw_brake_share=None, reason_shares={"HW_SLOWDOWN": 0.5})
    assert verdict(evidence(braked, tok_s=900.0)) == (Code.HW_THROTTLED, Level.CRITICAL)


def test_speculation_off_without_any_baseline():
    off = evidence(speculation="off", accept_length=None, expected=None)
    assert verdict(off) == (Code.SPECULATION_OFF, Level.CRITICAL)


@pytest.mark.parametrize("watts", [400.0, 541.0, 690.0])
def test_speculation_off_whatever_the_watts(watts):
    off = evidence(gpu(mean_w=watts), speculation="off", accept_length=None, tok_s=1144.0)
    assert verdict(off) == (Code.SPECULATION_OFF, Level.CRITICAL)


def test_speculation_off_is_found_when_only_the_baseline_had_it():
    job = replace(JOB, mtp_wanted=False)
    off = evidence(job=job, speculation="off", accept_length=None, tok_s=1144.0)
    assert verdict(off) == (Code.SPECULATION_OFF, Level.CRITICAL)


def test_acceptance_collapse():
    assert verdict(evidence(accept_length=1.02, tok_s=1100.0)) == (Code.ACCEPTANCE_COLLAPSE, Level.CRITICAL)
    assert verdict(evidence(accept_length=1.02, expected=None)) == (Code.ACCEPTANCE_COLLAPSE, Level.CRITICAL)
    assert verdict(evidence(accept_length=1.6, tok_s=1200.0)) == (Code.ACCEPTANCE_COLLAPSE, Level.CRITICAL)


def test_natural_text_may_accept_less_than_the_probe_did():
    job = replace(JOB, workload="natural")
    assert verdict(evidence(job=job, accept_length=1.6)) == (Code.HEALTHY, Level.OK)


def test_thermal_limited():
    warm = gpu(sw_thermal_share=0.2)
    assert verdict(evidence(warm)) == (Code.THERMAL_LIMITED, Level.WARNING)
    assert verdict(evidence(warm, tok_s=1200.0)) == (Code.THERMAL_LIMITED, Level.CRITICAL)


def test_limit_changed_against_the_baseline():
    capped = gpu(enforced_limit_w=400.0, mean_w=398.0)
    assert verdict(evidence(capped, tok_s=1300.0)) == (Code.LIMIT_CHANGED, Level.CRITICAL)
    assert verdict(evidence(gpu(enforced_limit_w=600.0))) == (Code.LIMIT_CHANGED, Level.WARNING)


def test_limit_below_the_boards_default_without_a_baseline():
    assert verdict(evidence(gpu(enforced_limit_w=400.0), expected=None)) == (Code.LIMIT_CHANGED, Level.WARNING)


def test_power_limited_is_a_remark_on_healthy():
    expected = replace(EXPECTED, power_w=692.0)
    judgement = judge(evidence(gpu(mean_w=695.0, sw_power_share=0.9), expected=expected))
    assert judgement.code is Code.HEALTHY
    assert [remark.code for remark in judgement.remarks] == [Code.POWER_LIMITED]


def test_kv_full():
    full = evidence(gpu(mean_w=400.0), tok_s=800.0, running=14.0, queued=18.0, kv_usage=0.99)
    assert verdict(full) == (Code.KV_FULL, Level.CRITICAL)


def test_kv_full_by_retractions():
    full = evidence(tok_s=800.0, running=20.0, queued=12.0, kv_usage=0.9, retractions=7.0)
    assert verdict(full) == (Code.KV_FULL, Level.CRITICAL)


def test_scheduler_starved():
    waiting = evidence(gpu(mean_w=400.0), tok_s=800.0, running=16.0, queued=16.0)
    assert verdict(waiting) == (Code.SCHEDULER_STARVED, Level.CRITICAL)
    idle_client = judge(evidence(gpu(mean_w=400.0), tok_s=800.0, running=16.0, queued=0.0))
    assert "client" in idle_client.summary


def test_launch_bound():
    assert verdict(evidence(gpu(mean_w=300.0), tok_s=800.0)) == (Code.LAUNCH_BOUND, Level.CRITICAL)


def test_comm_bound():
    job = replace(JOB, tensor_parallel=2)
    pair = (gpu("GPU-0", mean_w=300.0), gpu("GPU-1", mean_w=305.0))
    assert verdict(evidence(*pair, job=job, tok_s=800.0)) == (Code.COMM_BOUND, Level.CRITICAL)


def test_straggler():
    job = replace(JOB, tensor_parallel=4)
    group = [gpu(f"GPU-{i}", mean_w=430.0) for i in range(3)] + [gpu("GPU-3", mean_w=300.0, sm_clock_mhz=1200.0)]
    judgement = judge(evidence(*group, job=job, tok_s=800.0))
    assert (judgement.code, judgement.level) == (Code.STRAGGLER, Level.CRITICAL)
    assert "GPU-3" in judgement.summary


def test_inefficient():
    judgement = judge(evidence(gpu(mean_w=640.0), tok_s=1100.0))
    assert (judgement.code, judgement.level) == (Code.INEFFICIENT, Level.CRITICAL)
    assert "J/token" in judgement.summary


def test_workload_drift():
    assert verdict(evidence(tok_s=1200.0)) == (Code.WORKLOAD_DRIFT, Level.WARNING)


def test_power_anomaly_only_warns():
    assert verdict(evidence(gpu(mean_w=380.0))) == (Code.POWER_ANOMALY, Level.WARNING)
    assert verdict(evidence(gpu(mean_w=600.0))) == (Code.POWER_ANOMALY, Level.WARNING)


def test_uncalibrated():
    assert verdict(evidence(expected=None)) == (Code.UNCALIBRATED, Level.OK)


def test_a_critical_finding_is_not_hidden_behind_a_warning():
    both = judge(evidence(gpu(sw_thermal_share=0.2, mean_w=640.0, enforced_limit_w=650.0), speculation="off"))
    assert both.code is Code.SPECULATION_OFF
    assert {Code.THERMAL_LIMITED, Code.LIMIT_CHANGED} <= {remark.code for remark in both.remarks}


def test_every_verdict_says_what_to_look_at_next():
    assert set(NEXT_STEPS) == set(Code)
    assert all(NEXT_STEPS[code] for code in Code if code is not Code.HEALTHY)


# False positives of the research page.


def test_low_watts_at_one_request_are_no_fault():
    expected = replace(EXPECTED, tok_s=194.0, power_w=232.0, accept_length=None, speculation="unknown")
    one = evidence(gpu(mean_w=232.0), job=Job("s0", 1), expected=expected, running=1.0, in_flight=1.0, tok_s=190.0)
    assert verdict(one)[0] is Code.HEALTHY
    assert verdict(replace(one, expected=None))[0] is Code.UNCALIBRATED


def test_mtp_on_at_lower_watts_is_healthy():
    """Measured at C=1: 66 tok/s at 541 W without MTP, 139 tok/s at 495 W with it."""
    plain = replace(EXPECTED, tok_s=66.0, power_w=541.0, accept_length=None, speculation="off")
    judgement = judge(evidence(gpu(mean_w=495.0), job=Job("s0", 1, mtp_wanted=True), expected=plain, tok_s=139.0))
    assert (judgement.code, judgement.level) == (Code.HEALTHY, Level.OK)
    assert [remark.code for remark in judgement.remarks] == [Code.FASTER]


def test_mtp_need_not_raise_the_power_at_one_request():
    expected = replace(EXPECTED, tok_s=66.4, power_w=408.0)
    flat = evidence(gpu(mean_w=409.0, enforced_limit_w=420.0, default_limit_w=420.0), expected=expected, tok_s=66.0)
    assert judge(replace(flat, expected=replace(expected, enforced_limit_w=420.0))).code is Code.HEALTHY


def test_a_low_ceiling_of_an_expert_model_is_no_fault():
    expected = replace(EXPECTED, power_w=231.0)
    assert verdict(evidence(gpu(mean_w=235.0), expected=expected))[0] is Code.HEALTHY
    assert verdict(evidence(gpu(mean_w=235.0), expected=None))[0] is Code.UNCALIBRATED


def test_power_that_falls_with_concurrency_is_compared_with_its_own_baseline():
    at_256 = replace(EXPECTED, tok_s=6000.0, power_w=429.0)
    job = Job("s0", 256)
    assert (
        verdict(evidence(gpu(mean_w=431.0), job=job, expected=at_256, running=256.0, tok_s=6010.0))[0] is Code.HEALTHY
    )


def test_other_precision_and_other_task_never_fail_by_watts_alone():
    assert verdict(evidence(gpu(mean_w=860.0 / 2)))[1] is not Level.CRITICAL
    assert verdict(evidence(gpu(mean_w=690.0)))[1] is not Level.CRITICAL


def test_longer_thinking_warns_and_does_not_stop():
    assert verdict(evidence(gpu(mean_w=500.0), tok_s=1000.0)) == (Code.WORKLOAD_DRIFT, Level.WARNING)


def test_a_single_throttle_count_is_no_fault():
    assert verdict(evidence(gpu(hw_thermal_share=0.005, hw_brake_share=0.002)))[0] is Code.HEALTHY


def test_the_power_cap_bit_at_475_watts_is_no_proof_of_the_limit():
    bit = gpu(mean_w=475.0, sw_power_share=0.3)
    judgement = judge(evidence(bit))
    assert judgement.code is Code.HEALTHY
    assert not judgement.remarks


def test_an_administrators_cap_that_the_baseline_knows_is_no_change():
    capped = gpu(enforced_limit_w=450.0, mean_w=449.0)
    assert (
        verdict(evidence(capped, expected=replace(EXPECTED, enforced_limit_w=450.0, power_w=448.0)))[0] is Code.HEALTHY
    )


def test_mig_and_module_scope_pass_as_unknown():
    for reason in ("MIG is on", "only module power"):
        judgement = judge(evidence(gpu(unsupported=reason), tok_s=900.0))
        assert (judgement.code, judgement.level) == (Code.UNKNOWN, Level.UNKNOWN)
        assert reason in judgement.summary


def test_uneven_attention_data_parallelism_is_no_straggler():
    job = replace(JOB, tensor_parallel=2, dp_attention=True)
    pair = (gpu("GPU-0", mean_w=560.0), gpu("GPU-1", mean_w=400.0))
    assert verdict(evidence(*pair, job=job, expected=replace(EXPECTED, power_w=480.0)))[0] is Code.HEALTHY


def test_an_odd_gpu_at_full_speed_does_not_stop_the_run():
    job = replace(JOB, tensor_parallel=2)
    pair = (gpu("GPU-0", mean_w=560.0), gpu("GPU-1", mean_w=400.0))
    assert verdict(evidence(*pair, job=job))[1] is Level.OK
    assert verdict(evidence(*pair, job=job, expected=None)) == (Code.STRAGGLER, Level.WARNING)


def test_busy_at_rest_is_no_hang():
    """utilization.gpu can read 100 % on an idle server: without requests there is nothing to hang."""
    assert verdict(evidence(gpu(utilization=1.0), in_flight=0.0, stalled_s=600.0))[0] is not Code.HUNG_SPINNING


def test_a_slow_model_gets_ten_of_its_own_token_times():
    slow = replace(EXPECTED, tok_s=0.25, power_w=200.0)
    job = Job("s0", 1)
    waiting = evidence(gpu(mean_w=200.0), job=job, expected=slow, tok_s=0.25, stalled_s=30.0, running=1.0)
    assert verdict(waiting)[0] is Code.HEALTHY


def test_a_stall_without_power_is_reported_and_not_named_wrongly():
    judgement = judge(Evidence(JOB, replace(SERVICE, stalled_s=90.0, tok_s=0.0), (), None))
    assert (judgement.code, judgement.level) == (Code.UNKNOWN, Level.UNKNOWN)
    progress = next(e for e in judgement.expectations if e.name == "progress")
    assert not progress.passed


def test_engines_that_do_not_name_their_arguments_are_not_accused():
    assert verdict(evidence(speculation="unknown", accept_length=None, expected=None))[0] is Code.UNCALIBRATED


def test_a_cold_card_reads_lower_and_only_warns():
    cold = gpu(mean_w=430.0, temperature_c=31.0)
    assert verdict(evidence(cold)) == (Code.POWER_ANOMALY, Level.WARNING)


def test_prefill_bursts_raise_the_mean_and_only_warn():
    bursts = gpu(mean_w=540.0, p10_w=470.0, p90_w=690.0)
    assert verdict(evidence(bursts)) == (Code.POWER_ANOMALY, Level.WARNING)


def test_another_board_of_the_same_kind_gets_a_wider_band():
    """Boards differ by 5 % either way: what is out of the band of one's own board is in that of another."""
    reading = evidence(
        gpu(mean_w=430.0), expected=replace(EXPECTED, power_band=0.15, tok_s_band=0.15, same_board=False)
    )
    assert verdict(reading)[0] is Code.HEALTHY


def test_a_server_that_does_more_is_never_blamed_for_its_watts():
    for watts in (300.0, 690.0):
        assert verdict(evidence(gpu(mean_w=watts), tok_s=2000.0)) == (Code.HEALTHY, Level.OK)
