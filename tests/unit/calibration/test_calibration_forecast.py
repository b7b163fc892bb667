"""Forecasts: unbiased with unfinished answers, drain included, sums right, honest when nothing is known."""

import numpy as np
import pytest

from tasks.calibration.forecast import Rates, drain_s, forecast, total
from tasks.calibration.outlook import Outlook, estimate, made, record
from tasks.calibration.survival import binned, fit_tail
from tasks.calibration.survival import estimate as survival
from tasks.records import Progress
from tasks.report.read import read_forecasts
from tasks.runs import read_json


def lengths(n: int, seed: int = 0, sigma: float = 1.0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(7, sigma, n), 1, 32_768)


def test_mean_of_finished_answers_is_recovered():
    x = lengths(4000)
    found = survival(x.tolist(), [], 32_768, 200, np.random.default_rng(1)).mean()
    assert np.median(found) == pytest.approx(x.mean(), rel=0.02)
    assert np.quantile(found, 0.05) < x.mean() < np.quantile(found, 0.95)


def test_unfinished_answers_are_not_forgotten():
    """Everything longer than 1,500 tokens is still being written: done/elapsed would miss most of the work."""
    x = lengths(2000)
    done, ages = x[x <= 1500], np.full((x > 1500).sum(), 1500.0)
    found = np.median(survival(done.tolist(), ages.tolist(), 32_768, 200, np.random.default_rng(1)).mean())
    assert done.mean() < 0.5 * x.mean()
    assert found == pytest.approx(x.mean(), rel=0.25)


def test_survival_falls_from_one_to_zero_at_the_cap():
    found = survival(lengths(300).tolist(), [100.0] * 20, 32_768, 50, np.random.default_rng(1))
    assert np.all(found.values[:, 0] == 1) and np.all(found.values[:, -1] == 0)
    assert np.all(np.diff(found.values, axis=1) <= 1e-12)
    assert np.allclose(found.residual()[:, -1], 1)


def test_an_answer_cut_at_the_limit_counts_as_that_long():
    x = np.concatenate([lengths(500), np.full(100, 4096.0)])
    found = survival(np.minimum(x, 4096).tolist(), [], 4096, 100, np.random.default_rng(1)).mean()
    assert np.median(found) == pytest.approx(np.minimum(x, 4096).mean(), rel=0.03)


def test_many_lengths_are_merged_without_moving_the_mean():
    x = lengths(50_000)
    times, deaths, counts = binned(x, np.array([10.0, 0.0]))
    assert len(times) <= 1501
    assert counts[deaths].sum() == 50_000 and counts[~deaths].sum() == 1
    assert (times * counts)[deaths].sum() == pytest.approx(x.sum(), rel=1e-9)


def test_the_tail_of_an_exponential_is_flat_and_of_a_power_law_heavy():
    rng = np.random.default_rng(3)
    shapes = []
    for x in (rng.exponential(1000, 4000), 1000 * rng.pareto(1.5, 4000)):
        times, deaths, counts = binned(x, np.array([]))
        shapes.append(fit_tail(times, deaths, counts, None).parameters[1])
    assert shapes[0] == pytest.approx(0.0, abs=0.12)
    assert shapes[1] == pytest.approx(1 / 1.5, abs=0.15)


def test_too_little_for_a_tail():
    times, deaths, counts = binned(np.array([5.0, 9.0]), np.array([7.0]))
    assert fit_tail(times, deaths, counts, 100.0) is None
    told = forecast([5.0, 9.0], [7.0], 10, 100.0, 4, max_tokens=100)
    assert told is not None and told.time_s[1] <= told.time_s[0] <= told.time_s[2]


def test_time_is_work_over_throughput_plus_the_drain():
    x = np.full(500, 1000.0)
    told = forecast(x.tolist(), [], 10_000, 5000.0, 50, max_tokens=1000, rates=Rates(5000.0, 50, tok_s_sd=0.0))
    assert told.tokens[0] == pytest.approx(10_000_000, rel=0.01)
    # 200 rounds of 10 s; at the end the slots are evenly out of step in the equilibrium, half a round more.
    assert told.time_s[0] == pytest.approx(2005, rel=0.01)


def test_few_waiting_prompts_are_followed_slot_by_slot():
    x = np.full(200, 1000.0)
    told = forecast(x.tolist(), [400.0] * 4, 6, 400.0, 4, max_tokens=1000, rates=Rates(400.0, 4, tok_s_sd=0.0))
    assert told.tokens[0] == pytest.approx(4 * 600 + 2 * 1000, rel=0.02)
    assert told.time_s[0] == pytest.approx(16, rel=0.03)  # 600 tokens at 100 a second, then 1,000


def test_drain_speeds_up_when_the_curve_says_so():
    left = np.array([[100.0, 200.0, 400.0]])
    same = drain_s(left, Rates(300.0, 3))
    assert same[0] == pytest.approx(4.0)
    faster = drain_s(left, Rates(300.0, 3, curve=((1.0, 200.0), (3.0, 300.0))))
    assert faster[0] < same[0]


def test_energy_and_cost_follow_time():
    rates = Rates(1000.0, 10, power_w=500.0, gpus=2, price_per_gpu_hour=3.0, price_per_kwh=0.2)
    told = forecast(lengths(500).tolist(), [], 5000, 1000.0, 10, max_tokens=32_768, rates=rates)
    hours = told.time_s[0] / 3600
    assert told.energy_kwh[0] == pytest.approx(0.5 * hours)
    assert told.cost[0] == pytest.approx(6 * hours + 0.1 * hours)


def test_nothing_known_is_none_and_nothing_left_is_zero():
    assert forecast([], [100.0] * 8, 1000, 500.0, 8) is None
    assert forecast([10.0], [], 1000, 0.0, 8) is None
    assert forecast([10.0], [], 0, 500.0, 8).time_s == (0.0, 0.0, 0.0)


def test_more_finished_answers_narrow_the_interval():
    widths = []
    for n in (100, 1000, 10_000):
        told = forecast(lengths(n).tolist(), [], 900_000, 4000.0, 64, max_tokens=32_768)
        widths.append((told.time_s[2] - told.time_s[1]) / told.time_s[0])
    assert widths[0] > widths[1] > widths[2]


def test_a_sample_of_finished_answers_is_weighed_against_all_in_flight():
    """Answers in flight are long ones met in the middle; beside a sample of the finished they would weigh double."""
    x = lengths(400_000)
    sample, ages = x[:20_000], np.sort(x[-2000:])[-1000:] * 0.5
    exact = forecast(x.tolist(), ages.tolist(), 50_000, 4000.0, 1000, max_tokens=32_768)
    weighed = forecast(sample.tolist(), ages.tolist(), 50_000, 4000.0, 1000, max_tokens=32_768, finished=400_000)
    plain = forecast(sample.tolist(), ages.tolist(), 50_000, 4000.0, 1000, max_tokens=32_768)
    assert abs(weighed.tokens[0] - exact.tokens[0]) < abs(plain.tokens[0] - exact.tokens[0])


def test_total_adds_what_is_gone():
    told = forecast(lengths(500).tolist(), [], 5000, 1000.0, 10)
    assert total(told, 100.0)[0] == pytest.approx(told.time_s[0] + 100)


def progress(done: int, elapsed_s: float = 100.0) -> Progress:
    return Progress(10_000, done, 10, 64, 1000 * done, elapsed_s, 4000.0)


def test_outlook_estimates_seldom_counts_down_and_keeps_history(tmp_path):
    now, path = [0.0], tmp_path / "forecast.json"
    outlook = Outlook(Rates(4000.0, 64), 32_768, path, clock=lambda: now[0])
    assert outlook.eta is None
    x = lengths(500).tolist()
    outlook.update(progress(500), x, [100.0] * 64)
    first = outlook.eta
    now[0] = 10.0
    assert outlook.update(progress(900), x, []) is outlook.latest
    assert outlook.eta[0] == pytest.approx(first[0] - 10)
    now[0] = 30.0
    outlook.update(progress(505), x, [])
    assert [entry["done"] for entry in outlook.history] == [500]
    now[0] = 60.0
    outlook.update(progress(600), x, [])
    assert [entry["done"] for entry in outlook.history] == [500, 600]
    assert [entry["done"] for entry in read_forecasts(path)] == [500, 600]


def test_forecasts_are_recorded_with_what_came_true(tmp_path):
    told = estimate(progress(500), lengths(500).tolist(), [100.0] * 64, Rates(4000.0, 64), 32_768)
    assert told.remaining_prompts == 9490
    record(tmp_path / "forecast.json", [made(told, progress(500))])
    record(tmp_path / "forecast.json", [], actual_s=4321.0)
    value = read_json(tmp_path / "forecast.json")
    assert len(value["forecasts"]) == 1 and value["actual_s"] == 4321.0
    assert value["forecasts"][0]["total_s"][0] == pytest.approx(told.time_s[0] + 100)
