"""Baselines: the key is the intended job, everything else is compared."""

from dataclasses import replace

import pytest

from power_fakes import info
from tasks.errors import StorageError
from tasks.power.baseline import (
    Baseline,
    Baselines,
    JobKey,
    build,
    changes,
    compared_fields,
    expected_from,
    model_digest,
    not_known_good,
    sku_of,
)
from tasks.power.evidence import Evidence, GpuEvidence, Job, ServiceEvidence
from tasks.power.statistics import summarize
from tasks.records import PowerSample
from tasks.storage import open_store

KEY = JobKey("NVIDIA H200 140GiB", "abc", "probe1-512", 32)
ARGUMENTS = {"tp_size": 1, "mem_fraction_static": 0.8, "speculative_algorithm": "EAGLE", "port": 30000}


def compared(**changed):
    return {**compared_fields([info()], ARGUMENTS, "on", "0.5.17"), **changed}


def baseline(**changed) -> Baseline:
    values = {
        "key": KEY,
        "tok_s": 1536.0,
        "tok_s_sd": 10.0,
        "power_w": 483.0,
        "power_w_sd": 4.0,
        "windows": 3,
        "j_per_token": 0.314,
        "accept_length": 3.0,
        "idle_w": 120.0,
        "compared": compared(),
    }
    return Baseline(**{**values, **changed})


def evidence(tok_s=1536.0, watts=483.0, **service) -> Evidence:
    stats = summarize(
        [
            PowerSample(time_s=i / 5, gpu_uuid="GPU-0", power_average_w=watts + i % 2, sm_clock_mhz=1980)
            for i in range(226)
        ]
    )
    values = {"window_s": 45.0, "running": 32.0, "tok_s": tok_s, "accept_length": 3.0, "speculation": "on"}
    return Evidence(
        Job("s0", 32, mtp_wanted=True), ServiceEvidence(**{**values, **service}), (GpuEvidence("GPU-0", stats, 120.0),)
    )


def test_the_key_is_the_intended_job_alone():
    assert KEY.text == JobKey("NVIDIA H200 140GiB", "abc", "probe1-512", 32).text
    assert KEY.text.startswith("nvidia-h200-140gib-probe1-512-c32-")
    others = [replace(KEY, sku="NVIDIA H100"), replace(KEY, model_digest="x"), replace(KEY, concurrency=64)]
    assert len({KEY.text, replace(KEY, workload="natural").text, *(other.text for other in others)}) == 5


def test_a_group_of_gpus_is_another_sku():
    assert sku_of([info(), info("GPU-b")]) == "2x NVIDIA H200 140GiB"
    assert sku_of([]) == "no-nvidia"


def test_model_digest_depends_on_what_is_served():
    assert model_digest("m") != model_digest("m", quantization="fp8") != model_digest("m", "rev")
    assert model_digest("m", None, None, state="bf16") == model_digest("m", state="bf16")


def test_written_to_the_folder_and_the_store_and_read_from_either(tmp_path):
    store = open_store(tmp_path / "bucket")
    both = Baselines(tmp_path / "run" / "baselines", store)
    assert both.read(KEY) is None
    path = both.write(baseline())
    assert both.read(KEY) == baseline()
    path.unlink()
    assert both.read(KEY) == baseline()
    assert Baselines(tmp_path / "elsewhere").read(KEY) is None


def test_a_damaged_baseline_is_named(tmp_path):
    (tmp_path / f"{KEY.text}.json").write_text("{")
    with pytest.raises(StorageError, match="delete it"):
        Baselines(tmp_path).read(KEY)


def test_a_baseline_of_another_version_is_named(tmp_path):
    folder = Baselines(tmp_path)
    folder.write(baseline(version=99))
    with pytest.raises(StorageError, match="version 99, expected 1"):
        folder.read(KEY)


def test_bands_by_board():
    same = expected_from(baseline(), compared())
    assert (same.same_board, same.tok_s_band, same.power_band) == (True, 0.08, 0.08)
    other = expected_from(baseline(), compared(gpu_uuids=["GPU-other"]))
    assert (other.same_board, other.tok_s_band) == (False, 0.15)


def test_a_noisy_baseline_has_a_wider_band():
    noisy = expected_from(baseline(tok_s=1000.0, tok_s_sd=50.0, power_w=400.0, power_w_sd=20.0), compared())
    assert noisy.tok_s_band == pytest.approx(0.15)
    assert noisy.power_band == pytest.approx(0.15)


def test_what_changed_is_listed_argument_by_argument():
    now = compared_fields([replace(info(), driver="590.1", enforced_limit_w=600.0)], ARGUMENTS, "off", "0.5.18")
    now["arguments"] = {**now["arguments"], "mem_fraction_static": 0.7, "new_in_this_version": 1}
    found = changes(compared(), now)
    assert found["driver"] == ("580.159.04", "590.1")
    assert found["enforced_limit_w"] == (700.0, 600.0)
    assert found["speculation"] == ("on", "off")
    assert found["--mem-fraction-static"] == (0.8, 0.7)
    assert "--new-in-this-version" not in found
    assert "--port" not in found


def test_built_from_three_windows():
    built = build(KEY, [evidence(1530.0), evidence(1540.0), evidence(1536.0)], evidence(), compared())
    assert built is not None
    assert built.tok_s == 1536.0
    assert built.tok_s_sd == pytest.approx(5.03, abs=0.01)
    assert (built.windows, built.accept_length, built.idle_w) == (3, 3.0, 120.0)
    assert built.j_per_token == pytest.approx(483.5 / 1536, rel=0.001)


def test_two_windows_are_too_few():
    assert build(KEY, [evidence(), evidence(), evidence(tok_s=None)], evidence(), compared()) is None


def test_only_a_known_good_run_becomes_a_baseline():
    assert not_known_good(evidence(), [], True) == []
    assert not_known_good(evidence(), ["12 s of window, 30 s wanted"], True)
    assert not_known_good(evidence(), [], False) == ["a hard rule fires"]
    assert any("speculation is off" in r for r in not_known_good(evidence(speculation="off"), [], True))
    assert any("acceptance" in r for r in not_known_good(evidence(accept_length=None), [], True))
    assert any("power" in r for r in not_known_good(replace(evidence(), gpus=()), [], True))
