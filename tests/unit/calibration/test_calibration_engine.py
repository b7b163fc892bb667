"""Calibration through the real engine over HTTP, against SIMULATED servers: limits found, every answer kept."""

from pathlib import Path

import pytest

from runs_for_tests import engine, new_run, prompts
from simulator import SimFleet, SimSettings
from tasks.calibration.latency import LatencyProbe
from tasks.calibration.levels import summarize
from tasks.calibration.outlook import estimate, rates_from
from tasks.calibration.run import by_server, calibrate
from tasks.calibration.settings import CalibrationSettings
from tasks.generation.plan import ledger

SERVER = SimSettings(max_running=24, request_tok_s=100, saturation=8, speedup=8, median_tokens=60, sigma=0.6)


@pytest.mark.slow
async def test_calibration_drives_the_engine_and_loses_no_answer(tmp_path: Path) -> None:
    made = prompts(6000)
    paths = new_run(tmp_path, made)
    settings = CalibrationSettings(start=2, limit=64, window_s=0.8, max_window_s=6)
    with SimFleet(2, SERVER) as fleet:
        running = engine(paths, fleet)
        running.start()
        try:
            names = running.servers()
            result = await calibrate(
                running,
                settings,
                "k",
                tmp_path,
                ttft=LatencyProbe(fleet.records()),
                pending=lambda: running.progress().total - running.progress().done,
            )
            progress, lengths = running.progress(), running.lengths()
        finally:
            await running.stop("calibrated")
    assert set(result.limits) == set(names)
    for name, windows in by_server(result).items():
        levels = summarize(windows)
        assert 8 <= result.limits[name] <= 24  # it runs 24 at once; the curve is within 2 % of its end from about 20
        assert levels[result.limits[name]].tok_s > 1.5 * levels[2].tok_s
        assert 0 < levels[2].ttft_s < 5
    assert progress.done > 50
    told = estimate(progress, *lengths, rates_from(result), 2048)
    assert told is not None and told.time_s[1] < told.time_s[0] < told.time_s[2]
    kept = ledger(paths)
    assert len(kept.done) >= progress.done
    assert len(kept.done) + len(kept.failed) + len(kept.pending) == 6000
