"""Fleets: beside each other, cached under a key, with failing, slow and starving servers. Simulated servers."""

import asyncio
from dataclasses import replace

import pytest

from calibration_curves import Curve, CurveDriver, saturating
from tasks.calibration.levels import summarize
from tasks.calibration.outlook import rates_from
from tasks.calibration.run import (
    as_dict,
    cache_path,
    calibrate,
    calibration_key,
    describe,
    from_dict,
    stragglers,
    table,
)
from tasks.calibration.settings import BudgetSettings, CalibrationSettings
from tasks.errors import GateError, ServerError

SETTINGS = CalibrationSettings(limit=128)
FAST, SLOW = Curve("fast", saturating(4000, 20)), Curve("slow", saturating(2000, 20))


async def test_every_server_gets_its_limit_and_the_driver_is_left_at_it(tmp_path):
    driver = CurveDriver({"a": FAST, "b": FAST, "c": SLOW})
    result = await calibrate(driver, SETTINGS, "k", tmp_path)
    assert set(result.limits) == {"a", "b", "c"}
    assert all(driver.limit(name) == limit for name, limit in result.limits.items())
    assert result.tok_s == pytest.approx(sum(c.truth(result.limits[n]) for n, c in driver.curves.items()), rel=0.01)
    assert set(stragglers(result)) == {"c"}
    assert "c at 5" in describe(result)


async def test_servers_are_measured_beside_each_other(tmp_path):
    class Slow(CurveDriver):
        busy, most = 0, 0

        async def window(self, server, min_s, max_s):
            type(self).busy += 1
            type(self).most = max(self.most, self.busy)
            await asyncio.sleep(0.001)
            type(self).busy -= 1
            return await super().window(server, min_s, max_s)

    await calibrate(Slow(dict.fromkeys("abcd", FAST)), SETTINGS, "k", tmp_path)
    assert Slow.most == 4


async def test_cached_by_key_and_a_changed_key_measures_again(tmp_path):
    first = await calibrate(CurveDriver({"a": FAST}), SETTINGS, "k1", tmp_path)
    driver = CurveDriver({"a": FAST, "new": FAST})
    again = await calibrate(driver, SETTINGS, "k1", tmp_path)
    assert again.cached and not first.cached
    assert driver.clock == {"a": 0.0, "new": 0.0}
    assert again.limits == {"a": first.limits["a"], "new": first.limits["a"]}
    assert again.tok_s == pytest.approx(2 * first.tok_s)
    assert driver.limit("new") == first.limits["a"]
    lower = SETTINGS.model_copy(update={"limit": 9})
    assert (await calibrate(driver, lower, "k1", tmp_path, capacities={"new": 5})).limits == {"a": 9, "new": 5}
    assert not (await calibrate(CurveDriver({"a": FAST}), SETTINGS, "k2", tmp_path)).cached
    fresh = SETTINGS.model_copy(update={"use_cache": False})
    assert not (await calibrate(CurveDriver({"a": FAST}), fresh, "k1", tmp_path)).cached


async def test_a_damaged_cache_is_measured_again(tmp_path):
    cache_path(tmp_path, "k").write_text("{broken")
    assert not (await calibrate(CurveDriver({"a": FAST}), SETTINGS, "k", tmp_path)).cached
    assert (await calibrate(CurveDriver({"a": FAST}), SETTINGS, "k", tmp_path)).cached


async def test_results_survive_json(tmp_path):
    result = await calibrate(CurveDriver({"a": FAST}), SETTINGS, "k", tmp_path)
    assert from_dict(as_dict(result)) == result


async def test_off_means_the_start_value(tmp_path):
    driver = CurveDriver({"a": FAST})
    result = await calibrate(driver, CalibrationSettings(enabled=False, start=7), "k", tmp_path)
    assert (result.limits, driver.limit("a"), result.windows) == ({"a": 7}, 7, ())


class Failing(CurveDriver):
    async def window(self, server, min_s, max_s):
        if server == "bad":
            raise ServerError("connection refused")
        return await super().window(server, min_s, max_s)


async def test_a_server_that_fails_is_left_out_and_named_and_nothing_is_cached(tmp_path):
    result = await calibrate(Failing({"good": FAST, "bad": FAST}), SETTINGS, "k", tmp_path)
    assert set(result.limits) == {"good"}
    assert "bad: ServerError connection refused" in result.stopped_because
    assert not cache_path(tmp_path, "k").exists()


async def test_no_server_measured_is_an_error_that_names_each(tmp_path):
    with pytest.raises(ServerError, match="bad: ServerError connection refused"):
        await calibrate(Failing({"bad": FAST}), SETTINGS, "k", tmp_path)
    with pytest.raises(ServerError, match="no live server"):
        await calibrate(CurveDriver({}), SETTINGS, "k", tmp_path)


async def test_a_gates_no_ends_calibration_as_itself(tmp_path):
    def pending():
        raise GateError("the answers are no good")

    with pytest.raises(GateError, match="no good"):
        await calibrate(CurveDriver({"a": FAST, "b": FAST}), SETTINGS, "k", tmp_path, pending=pending)


async def test_the_search_ends_before_prompts_run_short(tmp_path):
    driver = CurveDriver({"a": FAST, "b": FAST})
    result = await calibrate(driver, SETTINGS, "k", tmp_path, pending=lambda: 100)
    assert max(w.concurrency for w in result.windows) == 16
    assert "100 prompts left are too few for 32 in flight" in result.stopped_because


async def test_a_window_that_cannot_be_filled_is_not_waited_for(tmp_path):
    class Dry(CurveDriver):
        left = 1000

        async def window(self, server, min_s, max_s):
            if self.limit(server) >= 16:
                self.left = 0
                await asyncio.sleep(600)
            return await super().window(server, min_s, max_s)

    driver = Dry({"a": FAST})
    quick = SETTINGS.model_copy(update={"window_s": 0.1})
    async with asyncio.timeout(5):
        result = await calibrate(driver, quick, "k", tmp_path, pending=lambda: driver.left)
    assert result.limits == {"a": 8}
    assert "work ran short at 16" in result.stopped_because


async def test_windows_taken_while_a_lower_limit_drains_are_dropped(tmp_path):
    class Draining(CurveDriver):
        left = 3

        async def window(self, server, min_s, max_s):
            window = await super().window(server, min_s, max_s)
            if window.concurrency < max(self._seen, default=0) and self.left:
                self.left -= 1
                return replace(window, mean_running=2.0 * window.concurrency, output_tokens=1.0)
            self._seen.append(window.concurrency)
            return window

    driver = Draining({"a": Curve("slots", saturating(3000, 12), capacity=22)})
    driver._seen = []
    result = await calibrate(driver, SETTINGS, "k", tmp_path)
    assert driver.left == 0
    assert all(w.output_tokens > 1 for w in result.windows)
    assert result.limits == {"a": 22}


async def test_watts_and_mean_itl_are_added_where_the_driver_has_none(tmp_path):
    class Bare(CurveDriver):
        async def window(self, server, min_s, max_s):
            return replace(await super().window(server, min_s, max_s), power_w=None, itl_s=None)

    result = await calibrate(Bare({"a": FAST}), SETTINGS, "k", tmp_path, watts=lambda name, seconds: 480.0)
    window = result.windows[0]
    assert window.power_w == 480.0
    assert window.itl_s == pytest.approx(4 / FAST.truth(4))
    assert table(result)[0]["J/token"] == pytest.approx(480 / FAST.truth(4), abs=0.001)


async def test_rates_of_the_fleet(tmp_path):
    result = await calibrate(CurveDriver({"a": FAST, "b": FAST}), SETTINGS, "k", tmp_path)
    rates = rates_from(result, BudgetSettings(price_per_gpu_hour=2.5), gpus=2)
    level = result.limits["a"]
    assert rates.concurrency == 2 * level
    assert rates.power_w == pytest.approx(2 * summarize(result.windows)[level].power_w)
    assert dict(rates.curve)[8.0] == pytest.approx(2 * FAST.truth(4))
    assert (rates.gpus, rates.price_per_gpu_hour) == (2, 2.5)


def test_the_key_changes_with_server_arguments():
    job = {"sku": "H200", "model": "m", "arguments": {"speculative_num_steps": 3}}
    assert calibration_key(**job) == calibration_key(**dict(reversed(job.items())))
    assert calibration_key(**job) != calibration_key(**{**job, "arguments": {}})
