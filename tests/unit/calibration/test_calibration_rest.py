"""Budget gate, a person's approval, definitions of latency, MTP comparison, plots and smoothing."""

import json
from collections import defaultdict

import pytest

from calibration_curves import Curve, CurveDriver, humped, saturating
from flows.approval import BudgetApproval, approved, decided, question
from paths import shared
from tasks.calibration.budget import check, rows_of
from tasks.calibration.levels import summarize
from tasks.calibration.metrics import StreamTiming, j_per_token, median_or_none, output_tok_s
from tasks.calibration.mtp_compare import compare
from tasks.calibration.plots import forecast_png, points, throughput_png
from tasks.calibration.run import calibrate
from tasks.calibration.settings import BudgetSettings, CalibrationSettings
from tasks.calibration.smooth import fit, smoothed
from tasks.records import Forecast, Level, LoadWindow

PNG = b"\x89PNG"
TEN_HOURS = Forecast(1000, (2e6, 1.8e6, 2.3e6), (36_000.0, 32_400.0, 43_200.0), 55.0, None, (100.0, 90.0, 120.0))


@pytest.mark.parametrize(
    ("budget", "verdict", "level"),
    [
        ({}, "NO_BUDGET", Level.OK),
        ({"deadline_h": 13}, "WITHIN_BUDGET", Level.OK),
        ({"deadline_h": 11}, "MAY_GO_OVER", Level.WARNING),
        ({"deadline_h": 9}, "OVER_DEADLINE", Level.CRITICAL),
        ({"max_cost": 95}, "OVER_COST", Level.CRITICAL),
        ({"max_cost": 130, "deadline_h": 13}, "WITHIN_BUDGET", Level.OK),
    ],
)
def test_budget_verdicts(budget, verdict, level):
    report = check(TEN_HOURS, BudgetSettings(**budget), 8)
    assert (report.verdict, report.level) == (verdict, level)
    assert report.stops == (level is Level.CRITICAL)
    assert "10 h (9 to 12)" in report.summary


def test_time_that_is_gone_counts_against_the_deadline_and_the_cost():
    budget = BudgetSettings(deadline_h=13, max_cost=115)
    assert check(TEN_HOURS, budget, 8).verdict == "MAY_GO_OVER"
    late = check(TEN_HOURS, budget, 8, elapsed_s=4 * 3600)
    assert late.verdict == "OVER_DEADLINE"
    assert late.details["cost"][0] == pytest.approx(140)


def test_a_cost_limit_without_a_price_is_a_warning_that_says_so():
    report = check(Forecast(5, (1, 1, 1), (10.0, 9.0, 11.0), 1.0), BudgetSettings(max_cost=5), 1)
    assert report.level is Level.WARNING
    assert "price_per_gpu_hour" in report.summary


def test_no_forecast_does_not_stop():
    assert not check(None, BudgetSettings(deadline_h=1), 1).stops


def test_rows_of_a_forecast_leave_out_what_is_unknown():
    assert [row["what"] for row in rows_of(TEN_HOURS)] == ["time that remains", "output tokens to come", "cost"]


OVER = check(TEN_HOURS, BudgetSettings(deadline_h=9), 8)


def test_an_approval_lets_the_run_go_on_and_is_remembered():
    report = decided(OVER, BudgetApproval(approve=True, name="Ada", reason="it is paid for"))
    assert not report.stops
    assert report.verdict == "APPROVED"
    assert report.details["approval"] == {"approve": True, "name": "Ada", "reason": "it is paid for"}


@pytest.mark.parametrize("answer", [None, BudgetApproval(approve=False, name="Ada")])
def test_a_refusal_still_stops(answer):
    report = decided(OVER, answer)
    assert report.stops
    assert "refused by" in report.summary


async def test_nobody_is_asked_when_the_budget_says_fail_or_holds():
    assert await approved(OVER, BudgetSettings(deadline_h=9)) is OVER
    inside = check(TEN_HOURS, BudgetSettings(deadline_h=13), 8)
    assert await approved(inside, BudgetSettings(deadline_h=13, over_budget="approve")) is inside


def test_the_question_shows_what_is_over():
    assert "10 h (9 to 12) h is over" not in question(OVER)
    assert "is over the deadline of 9 h" in question(OVER)


def test_latencies_of_a_stream_whose_chunks_carry_several_tokens():
    timing = StreamTiming(10.0, (10.5, 10.6, 10.9, 11.2), (0, 1, 3, 2))
    assert timing.ttft_s == pytest.approx(0.6)
    assert timing.icl_s == pytest.approx([0.3, 0.3])
    assert timing.itl_s == pytest.approx([0.1, 0.1, 0.1, 0.15, 0.15])
    assert timing.tpot_s == pytest.approx(0.6 / 5)
    assert sum(timing.itl_s) / 5 == pytest.approx(timing.tpot_s)


def test_a_stream_without_tokens_has_no_latencies():
    silent = StreamTiming(0.0, (1.0,), (0,))
    assert (silent.ttft_s, silent.itl_s, silent.tpot_s) == (None, [], None)


def test_throughput_and_joules_per_token():
    windows = [LoadWindow("a", 8, 10.0, 4000.0, 8.0, power_w=480.0), LoadWindow("a", 8, 30.0, 16_000.0, 8.0)]
    assert output_tok_s(windows) == 500.0
    assert j_per_token(windows[0]) == pytest.approx(1.2)
    assert j_per_token(windows[1]) is None
    assert median_or_none([None, 3.0, 1.0]) == 2.0 and median_or_none([None]) is None


def recorded(steps: int, concurrency: int) -> list[LoadWindow]:
    """A real H200's window, from the recorded sweeps."""
    path = shared(f"captures/sglang-0.5.17-h200/bench/27b-mtp{steps}-decode-levels.json")
    for level in json.loads(path.read_text())["levels"]:
        if level["concurrency"] == concurrency:
            return [LoadWindow("h200", concurrency, level["seconds"], level["output_tokens"], concurrency,
                               power_w=level["power_w_mean"])]  # fmt: skip
    return []


@pytest.mark.parametrize(("concurrency", "best"), [(1, 5), (16, 5), (32, 3)])
def test_best_draft_steps_of_the_recorded_sweeps(concurrency, best):
    windows = {steps: found for steps in (1, 2, 3, 4, 5) if (found := recorded(steps, concurrency))}
    result = compare(windows, dict.fromkeys(windows, concurrency))
    assert result.best.steps == best
    assert "most tokens/s" in result.reason or "fewest joules" in result.reason


def test_equal_speed_is_decided_by_joules_then_by_steps():
    def windows(watts: float | None, tok_s: float = 1000.0) -> list[LoadWindow]:
        return [LoadWindow("a", 8, 10.0, 10 * tok_s, 8.0, power_w=watts)]

    limits = {0: 8, 2: 8, 3: 8}
    assert compare({2: windows(600), 3: windows(500, 990)}, limits).best.steps == 3
    assert compare({2: windows(None), 3: windows(None)}, limits).best.steps == 2
    assert compare({0: windows(600, 2000), 3: windows(500)}, limits).reason.startswith("MTP off: most tokens/s")
    with pytest.raises(ValueError, match="usable window"):
        compare({3: [LoadWindow("a", 8, 10.0, 0.0, 8.0)]}, limits)


async def test_plots_are_pictures_and_mark_the_choice(tmp_path):
    driver = CurveDriver({"a": Curve("x", saturating()), "b": Curve("y", humped())})
    result = await calibrate(driver, CalibrationSettings(limit=128), "k", tmp_path)
    assert throughput_png(result).startswith(PNG)
    chosen = defaultdict(list)
    for point in points(result):
        if point["chosen"]:
            chosen[point["server"]].append(point["in_flight"])
    assert dict(chosen) == {name: [limit] for name, limit in result.limits.items()}


def test_forecast_plot():
    history = [{"elapsed_s": 3600.0 * i, "total_s": [36_000.0, 30_000.0, 45_000.0]} for i in range(1, 4)]
    assert forecast_png(history, 34_000.0).startswith(PNG)
    assert forecast_png([]) == b""


def test_a_saturating_curve_is_recognised_and_others_are_left_alone():
    def levels(curve: Curve):
        return summarize([LoadWindow("a", c, 10.0, 10 * curve.truth(c), c) for c in (4, 8, 16, 32, 64, 128)])

    found = fit(levels(Curve("x", saturating(4400, 24))), 0.01, 10.0)
    assert (found.peak_tok_s, found.half) == (pytest.approx(4400, rel=0.01), pytest.approx(24, rel=0.01))
    hump = levels(Curve("y", humped()))
    assert fit(hump, 0.01, 10.0) is None
    assert smoothed(hump, 0.01, 10.0)[0] == hump
