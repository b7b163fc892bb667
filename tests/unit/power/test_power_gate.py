"""Probe, gate and live watch against a simulated server whose watts follow its load."""

import asyncio
import time
from dataclasses import replace

import pytest

from power_fakes import UUID, FakeSensor, info
from simulator.faults import Fault
from simulator.fleet import SimFleet
from simulator.settings import SimSettings
from tasks.power import gate, probe, rules
from tasks.power.baseline import Baselines
from tasks.power.evidence import gpus_of
from tasks.power.gate import baseline_gate, hard_rules
from tasks.power.live import LiveWatch, expected_from_windows
from tasks.power.probe import Answer, ProbeResult, prompt, run_probe
from tasks.power.rig import Rig
from tasks.power.sampler import PowerSampler
from tasks.power.settings import PowerSettings
from tasks.power.statistics import WindowRules
from tasks.records import GateReport, Level, LoadWindow, Server, ServiceSample

MTP = {"speculative_algorithm": "EAGLE", "tp_size": 1}
PLAIN = {"speculative_algorithm": None, "tp_size": 1}
SIM = SimSettings(max_running=8, request_tok_s=400.0)
LIMITS = {"sim0": 4}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Seconds instead of minutes; the rules themselves are tested with their own numbers elsewhere."""
    monkeypatch.setattr(probe, "SETTLE_S", 0.2)
    monkeypatch.setattr(probe, "POLL_S", 0.1)
    monkeypatch.setattr(probe, "STOP_S", 2.0)
    monkeypatch.setattr(gate, "HARD_SECONDS", 1.0)


class Bench:
    """A simulated fleet, a sensor and a sampler, as a Rig."""

    def __init__(self, sim=SIM, arguments=MTP, limit_w=700.0, count=1) -> None:
        self.fleet = SimFleet(count, sim)
        self.arguments, self.limit_w = arguments, limit_w
        self.settings = PowerSettings(
            # A wide band: this machine may be busy, and a sick server here is slower by half.
            probe_s=2.0,
            probe_output_tokens=64,
            idle_s=0.5,
            live_window_s=5.0,
            band_same_board=0.25,
        )

    def __enter__(self):
        self.fleet.__enter__()
        self.sensor = FakeSensor(
            lambda _: self.fleet.servers[0].power_w(), [replace(info(), enforced_limit_w=self.limit_w)]
        )
        self.sampler = PowerSampler(None, self.sensor, hz=20).__enter__()
        self.servers = [replace(s, gpu_uuids=(UUID,), arguments=self.arguments) for s in self.fleet.records()]
        return self

    def __exit__(self, *_):
        self.sampler.__exit__()
        self.fleet.__exit__()

    def rig(self, **changes) -> Rig:
        values = {
            "servers": self.servers,
            "sampler": self.sampler,
            "settings": self.settings,
            "model_digest": "m",
            "mtp_wanted": True,
            "rules": WindowRules(min_s=1.0, min_samples=10, floor_s=0.5),
        }
        return Rig(**{**values, **changes})


def failed(report: GateReport) -> set[str]:
    return {e.name for e in report.expectations if not e.passed}


async def test_a_probe_measures_what_the_server_does():
    with Bench() as bench:
        result = await run_probe(bench.servers[0], 4, seconds=2.0, output_tokens=64)
    assert result.reached
    assert not result.failures
    assert result.tok_s(result.start_s, result.end_s) == pytest.approx(1600.0, rel=0.25)
    assert result.in_flight() == pytest.approx(4.0, abs=1.0)
    assert len(result.spans) == 3


async def test_a_probe_of_more_than_fits_says_so():
    with Bench(replace(SIM, max_running=2)) as bench:
        result = await run_probe(bench.servers[0], 4, seconds=0.5, output_tokens=64, start_timeout_s=0.5)
    assert not result.reached


async def test_a_probe_of_a_dead_server_ends_and_tells():
    with Bench() as bench:
        dead = replace(bench.servers[0], base_url="http://127.0.0.1:9")
        result = await run_probe(dead, 2, seconds=0.5, output_tokens=64, start_timeout_s=0.3)
    assert result.answers == ()
    assert result.failures["connection"] >= 2


def test_tokens_are_spread_over_each_answers_time():
    answers = (Answer(0.0, 10.0, 100), Answer(5.0, 15.0, 200))
    result = ProbeResult("s", 2, 5.0, 10.0, answers, (), True, 0.0)
    assert result.tok_s(5.0, 10.0) == pytest.approx((50 + 100) / 5)
    assert result.tok_s(20.0, 30.0) == 0.0
    assert result.accept_length is None


def test_acceptance_is_tokens_per_step_over_all_answers():
    answers = (Answer(0, 1, 300, 100), Answer(0, 1, 100, 100), Answer(0, 1, 50))
    assert ProbeResult("s", 1, 0, 1, answers, (), True, 0.0).accept_length == pytest.approx(2.0)


def test_prompts_are_fixed_and_differ():
    texts = {prompt(slot, turn) for slot in range(32) for turn in range(8)}
    assert len(texts) == 256
    assert prompt(3, 2) == prompt(3, 2)


async def test_hard_rules_pass_a_sound_server():
    with Bench() as bench:
        report = await hard_rules(bench.rig())
    assert (report.verdict, report.level) == ("UNCALIBRATED", Level.OK)
    assert not report.stops
    assert report.details["servers"]["sim0"]["tok_s"] > 1000


async def test_hard_rules_stop_when_mtp_is_left_out():
    with Bench(replace(SIM, accept_length=None), PLAIN) as bench:
        report = await hard_rules(bench.rig())
        watching = await hard_rules(bench.rig(settings=bench.settings.model_copy(update={"gate": "monitor"})))
    assert (report.verdict, report.stops) == ("SPECULATION_OFF", True)
    assert report.next_steps
    assert (watching.verdict, watching.stops) == ("SPECULATION_OFF", False)


async def test_hard_rules_without_nvidia_pass_as_unknown():
    with Bench() as bench:
        report = await hard_rules(bench.rig(sampler=PowerSampler(None, None)))
    assert (report.verdict, report.level, report.stops) == ("UNKNOWN", Level.UNKNOWN, False)


async def test_a_missing_mtp_stops_even_without_nvidia():
    with Bench(arguments=PLAIN) as bench:
        report = await hard_rules(bench.rig(sampler=PowerSampler(None, None)))
    assert (report.verdict, report.stops) == ("SPECULATION_OFF", True)


async def test_hard_rules_find_a_hung_server(monkeypatch):
    monkeypatch.setattr(rules, "STALL_S", 0.8)
    monkeypatch.setattr(probe, "WARM_UP_S", 1.0)
    monkeypatch.setattr(probe, "START_S", 0.5)
    with Bench() as bench:
        bench.fleet.inject(0, Fault("wedge"))
        report = await hard_rules(bench.rig())
    assert (report.verdict, report.stops) == ("HUNG_PARKED", True)
    assert "progress" in failed(report)


async def test_a_server_that_answers_nothing_stops(monkeypatch):
    monkeypatch.setattr(probe, "START_S", 0.3)
    with Bench() as bench:
        broken = replace(bench.servers[0], model="x", base_url="http://127.0.0.1:9")
        report = await hard_rules(bench.rig(servers=[broken]))
    assert report.stops
    assert "answers" in failed(report)


async def test_a_baseline_is_written_and_the_rerun_is_healthy(tmp_path):
    with Bench() as bench:
        first = await baseline_gate(bench.rig(), LIMITS, Baselines(tmp_path))
        assert (first.verdict, first.level) == ("UNCALIBRATED", Level.OK)
        assert len(list(tmp_path.glob("*.json"))) == 1, first.expectations
        second = await baseline_gate(bench.rig(), LIMITS, Baselines(tmp_path))
    assert (second.verdict, second.level) == ("HEALTHY", Level.OK), second.summary
    assert second.details["servers"]["sim0"]["idle_w_per_gpu"] == pytest.approx(124.0, abs=2)


async def test_nothing_is_written_when_mtp_is_missing(tmp_path):
    with Bench(replace(SIM, accept_length=None), PLAIN) as bench:
        report = await baseline_gate(bench.rig(), LIMITS, Baselines(tmp_path))
    assert report.verdict == "SPECULATION_OFF"
    assert "baseline written" in failed(report)
    assert list(tmp_path.iterdir()) == []


async def test_a_slower_rerun_stops_and_a_lowered_limit_is_named(tmp_path):
    with Bench() as bench:
        await baseline_gate(bench.rig(), LIMITS, Baselines(tmp_path))
    with Bench(replace(SIM, request_tok_s=200.0), limit_w=400.0) as slow:
        report = await baseline_gate(slow.rig(), LIMITS, Baselines(tmp_path))
    assert (report.verdict, report.stops) == ("LIMIT_CHANGED", True)
    assert "unchanged: enforced_limit_w" in failed(report)
    assert "tokens per second" in failed(report)


async def test_mtp_left_out_of_a_rerun_is_found_with_the_baseline(tmp_path):
    with Bench() as bench:
        await baseline_gate(bench.rig(), LIMITS, Baselines(tmp_path))
    with Bench(replace(SIM, accept_length=None, request_tok_s=190.0), PLAIN) as plain:
        report = await baseline_gate(plain.rig(mtp_wanted=False), LIMITS, Baselines(tmp_path))
    assert (report.verdict, report.stops) == ("SPECULATION_OFF", True)


async def test_a_damaged_baseline_is_reported_not_fatal(tmp_path):
    with Bench() as bench:
        await baseline_gate(bench.rig(), LIMITS, Baselines(tmp_path))
        next(tmp_path.glob("*.json")).write_text("{")
        report = await baseline_gate(bench.rig(), LIMITS, Baselines(tmp_path))
    assert report.verdict == "UNCALIBRATED"
    assert "baseline readable" in failed(report)


async def test_a_slow_server_of_an_even_fleet_is_named(tmp_path):
    with Bench(count=3) as bench:
        bench.fleet.inject(2, Fault("slow", factor=2.0))
        rig = bench.rig(settings=bench.settings.model_copy(update={"accept_baseline": False}))
        limits = {f"sim{i}": 4 for i in range(3)}
        report = await baseline_gate(rig, limits, Baselines(tmp_path))
    assert list(tmp_path.iterdir()) == []
    uneven = next(e for e in report.expectations if e.name == "even fleet")
    assert not uneven.passed
    assert "sim2" in uneven.message


async def until(condition, timeout_s: float = 30.0) -> None:
    """Wait for what must come; the machine may be busy."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.05)


async def _load(server, seconds: float) -> None:
    await run_probe(server, 4, seconds=seconds, output_tokens=64)


async def test_live_watch_tells_a_hang_once_and_recovers(monkeypatch):
    monkeypatch.setattr(rules, "STALL_S", 1.0)
    hung: list[tuple[str, str]] = []
    reports: list[GateReport] = []
    with Bench() as bench:
        watch = LiveWatch(
            bench.rig(),
            lambda: LIMITS,
            on_change=reports.append,
            on_hung=lambda name, why: hung.append((name, why)),
            idle_w={UUID: 124.0},
            every_s=0.2,
        )
        with watch:
            load = asyncio.create_task(_load(bench.servers[0], 60.0))
            await until(lambda: watch.report is not None and watch.report.level is Level.OK)
            bench.fleet.inject(0, Fault("wedge"))
            await until(lambda: hung)
            assert hung[0][0] == "sim0"
            assert hung[0][1].startswith("HUNG_PARKED")
            assert watch.power_w() is not None
            bench.fleet.heal(0)
            await until(lambda: watch.report.level is Level.OK)
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    assert "HUNG_PARKED" in [report.verdict for report in reports]
    assert len(hung) == 1


async def test_live_watch_survives_a_listener_that_fails(monkeypatch):
    monkeypatch.setattr(rules, "STALL_S", 0.5)

    def broken(*_: object) -> None:
        raise RuntimeError("listener")

    with Bench() as bench:
        watch = LiveWatch(bench.rig(), lambda: LIMITS, on_change=broken, on_hung=broken, every_s=10)
        now_s = time.time()
        for step in range(6):
            sample = ServiceSample(now_s - 5 + step, "sim0", running=4, queued=0, gen_throughput_tok_s=5.0)
            watch.observe(sample)
        assert [j.hung for j in watch.step(now_s)] == [True]


def test_live_expectation_comes_from_calibrations_own_windows():
    windows = [
        LoadWindow("s", 4, 20.0, 8000.0, 4.0, power_w=400.0),
        LoadWindow("s", 8, 20.0, 14000.0, 8.0, power_w=900.0, accept_length=2.8),
        LoadWindow("s", 16, 20.0, 9000.0, 9.0, starved=True),
    ]
    expected = expected_from_windows(windows, gpus=2)
    assert expected is not None
    assert (expected.tok_s, expected.power_w, expected.tok_s_band) == (700.0, 450.0, 0.20)
    assert expected_from_windows([]) is None


def test_gpus_of_an_attached_local_server():
    infos = [info(f"GPU-{i}", index=i) for i in range(4)]
    local = Server("a", "http://127.0.0.1:30000", "m", arguments={"tp_size": 2, "base_gpu_id": 1})
    assert gpus_of(local, infos) == ("GPU-1", "GPU-2")
    assert gpus_of(replace(local, base_url="http://10.0.0.9:30000"), infos) == ()
    assert gpus_of(replace(local, gpu_uuids=("GPU-3", "GPU-elsewhere")), infos) == ("GPU-3",)
