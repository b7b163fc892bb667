"""Window statistics: made-up readings for the rules, recorded H200 traces for the truth."""

import csv
import json
from itertools import groupby

import pytest

from paths import shared
from tasks.power.codes import Code
from tasks.power.evidence import Evidence, Expected, GpuEvidence, Job, ServiceEvidence
from tasks.power.statistics import by_gpu, distinct, summarize, window_problems
from tasks.power.verdict import judge
from tasks.records import Level, PowerSample

BENCH_511 = "captures/sglang-0.5.11-h200/bench"
BENCH_517 = "captures/sglang-0.5.17-h200/bench"


def reading(time_s: float, power_w: float | None = 500.0, **changes) -> PowerSample:
    return PowerSample(time_s=time_s, gpu_uuid="GPU-0", power_average_w=power_w, **changes)


def series(seconds: float, hz: float = 5.0, **changes) -> list[PowerSample]:
    return [reading(i / hz, 500.0 + (i % 3), **changes) for i in range(int(seconds * hz) + 1)]


def trace(folder: str, name: str) -> dict[str, list[PowerSample]]:
    """Phase name to readings of one recorded run (one row a second)."""
    with shared(f"{folder}/{name}-samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        phase: [
            PowerSample(
                time_s=float(row["t"]),
                gpu_uuid="GPU-0",
                power_average_w=float(row["power_w"]),
                enforced_limit_w=float(row["limit_w"]),
                sm_clock_mhz=float(row["sm_mhz"]),
                temperature_c=float(row["temp_c"]),
                utilization=float(row["gpu_util"]) / 100,
                event_reasons=int(row["throttle"]),
                energy_j=float(row["energy_j"]),
            )
            for row in group
        ]
        for phase, group in groupby(rows, key=lambda row: row["phase"])
    }


def levels(folder: str, name: str) -> dict[int, dict]:
    record = json.loads(shared(f"{folder}/{name}-levels.json").read_text())
    return {level["concurrency"]: level for level in record["levels"]}


def test_repeated_readings_within_an_update_period_count_once():
    fast = [reading(i * 0.02, 500.0 + i // 5) for i in range(50)]
    assert distinct(fast)[0] == [500.0 + i for i in range(10)]


def test_an_equal_reading_after_an_update_period_is_new():
    assert len(distinct([reading(i * 0.2) for i in range(10)])[0]) == 10


def test_missing_and_zero_readings_are_dropped():
    watts, source = distinct([reading(0.0, None), reading(0.2, 0.0), reading(0.4, 480.0)])
    assert (watts, source) == ([480.0], "average")


def test_the_instant_field_is_used_only_without_the_average():
    only = [PowerSample(time_s=i * 0.2, gpu_uuid="GPU-0", power_instant_w=400.0) for i in range(3)]
    assert distinct(only)[1] == "instant"


def test_mean_percentiles_coverage():
    stats = summarize(series(40))
    assert stats is not None
    assert stats.mean_w == pytest.approx(501.0, abs=0.02)
    assert (stats.p10_w, stats.p90_w) == (500.0, 502.0)
    assert stats.coverage == pytest.approx(0.5, abs=0.01)
    assert window_problems(stats) == []


def test_energy_counter_is_cross_checked():
    good = summarize([reading(float(t), energy_j=1000.0 + 505.0 * t) for t in range(11)])
    bad = summarize([reading(float(t), energy_j=1000.0 + 90.0 * t) for t in range(11)])
    assert good is not None
    assert good.counter_trusted
    assert good.energy_j == pytest.approx(5050.0)
    assert bad is not None
    assert not bad.counter_trusted


def test_an_energy_counter_that_fell_back_is_not_used():
    stats = summarize([reading(0.0, energy_j=1e9), reading(10.0, energy_j=5.0)])
    assert stats is not None
    assert (stats.energy_j, stats.counter_trusted) == (None, False)


def test_throttle_counters_become_shares_of_the_window():
    stats = summarize([reading(float(t), throttle_sw_thermal_ns=t * 2.5e8) for t in range(11)])
    assert stats is not None
    assert stats.sw_thermal_share == pytest.approx(0.25)
    assert stats.hw_thermal_share is None


def test_short_sparse_and_warming_windows_are_named():
    short = summarize(series(10, temperature_c=40.0))
    warming = summarize([reading(i / 5, temperature_c=40.0 + i / 5 * 0.2) for i in range(226)])
    assert short is not None
    assert any("30 s wanted" in p for p in window_problems(short))
    assert any("200 wanted" in p for p in window_problems(short))
    assert warming is not None
    assert warming.drift_c_per_10s == pytest.approx(2.0)
    assert any("warming" in p for p in window_problems(warming))


def test_two_gpus_in_one_window_are_refused():
    mixed = [reading(0.0), PowerSample(time_s=0.1, gpu_uuid="GPU-1", power_average_w=1.0)]
    with pytest.raises(ValueError, match="by_gpu"):
        summarize(mixed)
    assert set(by_gpu(mixed)) == {"GPU-0", "GPU-1"}


def test_no_reading_no_statistics():
    assert summarize([]) is None
    assert summarize([reading(0.0, None)]) is None


@pytest.mark.parametrize("name", ["27b-plain", "27b-mtp", "27b-plain-decode-only"])
def test_recorded_windows_agree_with_their_record(name):
    """Means of the per-second trace against the figures written from the 5 Hz readings at the time."""
    phases, known = trace(BENCH_511, name), levels(BENCH_511, name)
    for concurrency, level in known.items():
        stats = summarize(phases[f"C{concurrency}"])
        assert stats is not None
        assert stats.mean_w == pytest.approx(level["power_w_mean"], rel=0.03)
        assert stats.fraction_of_enforced_limit == pytest.approx(level["share_of_limit"], abs=0.03)
        assert stats.counter_trusted


def test_recorded_idle_is_warm_idle():
    stats = summarize(trace(BENCH_511, "27b-mtp")["idle"])
    assert stats is not None
    assert 110 < stats.mean_w < 130


def test_the_recorded_power_cap_bit_at_475_watts():
    stats = summarize(trace(BENCH_511, "27b-mtp")["C64"])
    assert stats is not None
    assert stats.mean_w < 0.75 * 700
    assert stats.reason_shares.get("SW_POWER_CAP", 0) > 0


def recorded_evidence(name: str, concurrency: int, expected: Expected | None, **service) -> Evidence:
    level = levels(BENCH_511, name)[concurrency]
    mtp = "mtp" in name
    values = {
        "window_s": 10.0,
        "in_flight": float(concurrency),
        "running": float(concurrency),
        "queued": 0.0,
        "tok_s": level["output_tok_s"],
        "accept_length": level["tokens_per_verify"] if mtp else None,
        "speculation": "on" if mtp else "off",
    }
    stats = summarize(trace(BENCH_511, name)[f"C{concurrency}"])
    return Evidence(
        Job("s0", concurrency, mtp_wanted=mtp),
        ServiceEvidence(**{**values, **service}),
        (GpuEvidence("GPU-0", stats, idle_w=120.6),),
        expected,
    )


def known_good(name: str, concurrency: int) -> Expected:
    level = levels(BENCH_511, name)[concurrency]
    return Expected(
        tok_s=level["output_tok_s"],
        power_w=level["power_w_mean"],
        tok_s_band=0.08,
        power_band=0.08,
        j_per_token=level["joules_per_token"],
        accept_length=level["tokens_per_verify"],
        idle_w=120.6,
        enforced_limit_w=700.0,
        speculation="on" if "mtp" in name else "off",
    )


@pytest.mark.parametrize("concurrency", [1, 2, 4, 8, 16, 32, 64])
def test_recorded_mtp_at_lower_watts_is_not_accused(concurrency):
    """The heart of the matter: against the plain server's figures, MTP draws less and does more."""
    for expected in (known_good("27b-plain", concurrency), known_good("27b-mtp", concurrency), None):
        judgement = judge(recorded_evidence("27b-mtp", concurrency, expected))
        assert judgement.level is Level.OK, (concurrency, judgement.summary)
        assert judgement.code in (Code.HEALTHY, Code.UNCALIBRATED)


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_recorded_plain_server_is_found_where_mtp_was_wanted(concurrency):
    """Higher watts than the baseline, half the tokens: SPECULATION_OFF with a baseline and without one."""
    plain = recorded_evidence("27b-plain", concurrency, known_good("27b-mtp", concurrency))
    for expected in (plain.expected, None):
        wanted = Evidence(Job("s0", concurrency, mtp_wanted=True), plain.service, plain.gpus, expected)
        judgement = judge(wanted)
        assert (judgement.code, judgement.level) == (Code.SPECULATION_OFF, Level.CRITICAL)


def test_recorded_queue_at_128_is_named():
    """128 wanted, 64 slots: 1905 tok/s with 64 queued, 2043 with 64 in flight."""
    expected = Expected(tok_s=3055.0, power_w=571.0, tok_s_band=0.08, power_band=0.08, speculation="on")
    judgement = judge(recorded_evidence("27b-mtp", 128, expected, running=64.0, queued=64.0))
    assert (judgement.code, judgement.level) == (Code.SCHEDULER_STARVED, Level.CRITICAL)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_recorded_decode_at_the_limit_is_only_remarked(steps):
    """Decode-only at C=32 on 0.5.17 reaches the limit with the clock falling: normal at saturation."""
    phases, known = trace(BENCH_517, f"27b-mtp{steps}-decode"), levels(BENCH_517, f"27b-mtp{steps}-decode")
    for concurrency, level in known.items():
        stats = summarize(phases[f"C{concurrency}"])
        assert stats is not None
        expected = Expected(
            level["output_tok_s"], level["power_w_mean"], 0.08, 0.08, enforced_limit_w=700.0, speculation="on"
        )
        service = ServiceEvidence(7.0, running=float(concurrency), tok_s=level["output_tok_s"], speculation="on")
        found = Evidence(Job("s0", concurrency, mtp_wanted=True), service, (GpuEvidence("GPU-0", stats),), expected)
        judgement = judge(found)
        assert judgement.level is Level.OK, (concurrency, judgement.summary)
        if level["power_w_mean"] > 0.97 * 700 and any(level["throttle"]):
            assert Code.POWER_LIMITED in {remark.code for remark in judgement.remarks}
