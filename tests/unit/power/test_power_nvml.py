"""The NVML adapter against a library that answers as nvml.h says, and against the ways it fails."""

import importlib.metadata
import time

import pynvml
import pytest

from power_fakes import FakeLibrary
from tasks.errors import SensorError
from tasks.power.nvml import open_nvml, refuse_deprecated_distribution
from tasks.power.readings import EventReason, reason_names


def test_no_driver_library_here_is_none_not_an_error():
    assert open_nvml(FakeLibrary(broken={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})) is None
    assert open_nvml(FakeLibrary(broken={"nvmlInit": pynvml.NVML_ERROR_DRIVER_NOT_LOADED})) is None
    assert open_nvml(FakeLibrary(count=0)) is None


def test_nvml_that_is_broken_is_an_error_that_says_what_to_do():
    with pytest.raises(SensorError, match="reload the nvidia modules"):
        open_nvml(FakeLibrary(broken={"nvmlInit": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}))


def test_the_deprecated_distribution_is_refused():
    with pytest.raises(SensorError, match="pip uninstall -y pynvml"):
        refuse_deprecated_distribution(lambda name: "11.5.3")


def test_the_right_distribution_is_accepted():
    def absent(name: str) -> object:
        raise importlib.metadata.PackageNotFoundError(name)

    refuse_deprecated_distribution(absent)


def test_a_reading_in_our_units():
    nvml = open_nvml(FakeLibrary())
    assert nvml is not None
    sample = nvml.read("GPU-0")
    assert (sample.power_average_w, sample.power_instant_w) == (495.0, 512.0)
    assert (sample.enforced_limit_w, sample.default_limit_w) == (700.0, 700.0)
    assert sample.energy_j == pytest.approx(119_527.942)
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz) == (1980, 3201)
    assert (sample.temperature_c, sample.memory_temperature_c) == (44, 60)
    assert sample.utilization == pytest.approx(0.92)
    assert sample.event_reasons == EventReason.SW_POWER_CAP
    assert sample.throttle_hw_brake_ns == 0
    assert abs(sample.time_s - time.time()) < 5


def test_a_device_describes_itself():
    nvml = open_nvml(FakeLibrary(count=2))
    assert nvml is not None
    first, second = nvml.gpus()
    assert (first.uuid, second.uuid) == ("GPU-0", "GPU-1")
    assert first.unsupported is None
    assert first.sku == "NVIDIA H200 140GiB"
    assert (first.min_limit_w, first.max_limit_w) == (200.0, 700.0)
    assert (first.power_field, first.power_scope, first.gpm) == ("average", "gpu", True)
    assert first.capabilities["power_average_185"]


def test_module_scope_is_read_but_not_judged():
    nvml = open_nvml(FakeLibrary(scopes=(1,)))
    assert nvml is not None
    gpu = nvml.gpus()[0]
    assert gpu.power_scope == "module"
    assert "module power" in (gpu.unsupported or "")
    assert nvml.read("GPU-0").power_average_w == 495.0


def test_mig_is_unsupported():
    nvml = open_nvml(FakeLibrary(mig=1))
    assert nvml is not None
    assert "MIG" in (nvml.gpus()[0].unsupported or "")


def test_ga100_gives_instant_power_only():
    nvml = open_nvml(FakeLibrary(capability=(8, 0), fields={186: 400_000, 83: 1000}))
    assert nvml is not None
    sample = nvml.read("GPU-0")
    assert (sample.power_average_w, sample.power_instant_w) == (None, 400.0)
    assert nvml.gpus()[0].power_field == "instant"


def test_an_old_driver_falls_back_to_the_plain_call():
    nvml = open_nvml(FakeLibrary(capability=(8, 9), fields={}))
    assert nvml is not None
    assert nvml.read("GPU-0").power_average_w == 480.0
    old = open_nvml(FakeLibrary(capability=(7, 0), fields={}))
    assert old is not None
    assert old.read("GPU-0").power_instant_w == 480.0


def test_zero_milliwatts_is_no_reading():
    nvml = open_nvml(FakeLibrary(fields={185: 0, 186: 512_000}))
    assert nvml is not None
    assert nvml.read("GPU-0").power_average_w is None


def test_no_power_at_all_is_unsupported():
    lost = FakeLibrary(fields={}, broken={"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NOT_SUPPORTED})
    nvml = open_nvml(lost)
    assert nvml is not None
    assert nvml.read("GPU-0").power_average_w is None
    assert "no power reading" in (nvml.gpus()[0].unsupported or "")


def test_what_is_unsupported_is_asked_once():
    library = FakeLibrary(broken={"nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_NOT_SUPPORTED})
    nvml = open_nvml(library)
    assert nvml is not None
    assert [nvml.read("GPU-0").utilization for _ in range(3)] == [None] * 3
    assert library.calls["nvmlDeviceGetUtilizationRates"] == 1


def test_a_passing_error_is_counted_and_asked_again():
    library = FakeLibrary(broken={"nvmlDeviceGetTemperature": pynvml.NVML_ERROR_UNKNOWN})
    nvml = open_nvml(library)
    assert nvml is not None
    assert nvml.read("GPU-0").temperature_c is None
    library.broken.clear()
    assert nvml.read("GPU-0").temperature_c == 44
    assert nvml.transient_errors == 1


def test_a_lost_gpu_is_a_sensor_error():
    library = FakeLibrary()
    nvml = open_nvml(library)
    assert nvml is not None
    library.broken["nvmlDeviceGetUtilizationRates"] = pynvml.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(SensorError, match="Xid"):
        nvml.read("GPU-0")


def test_an_unknown_gpu_names_those_that_are_here():
    nvml = open_nvml(FakeLibrary())
    assert nvml is not None
    with pytest.raises(SensorError, match="found GPU-0"):
        nvml.read("GPU-9")


def test_limits_are_renewed_only_on_slow_readings():
    library = FakeLibrary()
    nvml = open_nvml(library)
    assert nvml is not None
    for slow in (True, False, False, True):
        nvml.read("GPU-0", slow=slow)
    assert library.calls["nvmlDeviceGetEnforcedPowerLimit"] == 2


def test_gpm_counters_between_two_calls():
    nvml = open_nvml(FakeLibrary())
    assert nvml is not None
    assert nvml.activity("GPU-0") is None
    time.sleep(0.11)
    activity = nvml.activity("GPU-0")
    assert activity is not None
    assert (activity.sm, activity.tensor, activity.dram) == pytest.approx((0.83, 0.21, 0.77))
    assert activity.pcie_rx_mb_s == pytest.approx(31.457, abs=0.01)
    assert activity.nvlink_rx_mb_s is None
    nvml.close()


def test_reason_bits_have_names():
    assert reason_names(0x4 | 0x40) == ["SW_POWER_CAP", "HW_THERMAL"]
    assert reason_names(0x1000) == ["0x1000"]
    assert reason_names(0) == reason_names(None) == []
