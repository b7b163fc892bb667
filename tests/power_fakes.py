"""Sensors and an NVML library that are not there: for tests of the power room without a GPU."""

import ctypes
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml

from tasks.power.readings import Activity, GpuInfo
from tasks.records import PowerSample

UUID = "GPU-00000000-0000-0000-0000-000000000000"


def info(uuid: str = UUID, **changes: Any) -> GpuInfo:
    values = {
        "index": 0,
        "uuid": uuid,
        "name": "NVIDIA H200",
        "driver": "580.159.04",
        "memory_bytes": 140 * 2**30,
        "enforced_limit_w": 700.0,
        "default_limit_w": 700.0,
        "power_field": "average",
        "power_scope": "gpu",
    }
    return GpuInfo(**{**values, **changes})


class FakeSensor:
    """A Sensor whose watts come from `watts(now_s)`; counts its readings."""

    def __init__(self, watts=lambda _: 480.0, infos=None, **fields: Any) -> None:
        self.infos = infos if infos is not None else [info()]
        self.watts, self.fields, self.reads, self.energy = watts, fields, 0, 0.0
        self.last_s: float | None = None
        self.fail: Exception | None = None

    def gpus(self) -> list[GpuInfo]:
        return list(self.infos)

    def read(self, uuid: str, *, slow: bool = True) -> PowerSample:
        self.reads += 1
        if self.fail:
            raise self.fail
        now_s = time.time()
        watts = self.watts(now_s)
        self.energy += watts * (now_s - self.last_s) if self.last_s else 0.0
        self.last_s = now_s
        described = next(i for i in self.infos if i.uuid == uuid)
        sample = PowerSample(
            time_s=now_s,
            gpu_uuid=uuid,
            power_average_w=watts,
            power_instant_w=watts,
            enforced_limit_w=described.enforced_limit_w,
            default_limit_w=described.default_limit_w,
            energy_j=self.energy,
            sm_clock_mhz=1980.0,
            memory_clock_mhz=3201.0,
            temperature_c=45.0,
            utilization=0.9,
            memory_used_bytes=10**10,
            event_reasons=0,
            throttle_sw_power_ns=0.0,
            throttle_sw_thermal_ns=0.0,
            throttle_hw_thermal_ns=0.0,
            throttle_hw_brake_ns=0.0,
        )
        return replace(sample, **self.fields)

    def activity(self, uuid: str) -> Activity | None:
        return Activity(uuid, 1.0, sm=0.8, dram=0.7, tensor=0.2, pcie_rx_mb_s=50.0, pcie_tx_mb_s=20.0)

    def close(self) -> None:
        pass


class FakeLibrary:
    """The pynvml functions that the adapter calls, with pynvml's own constants, structures and errors.

    `fields` is field number → value (missing: not supported); `scopes` restricts power fields to a scope; `broken` is
    function name → NVML error number.
    """

    def __init__(self, *, count=1, fields=None, scopes=(0,), broken=None, capability=(9, 0), mig=0) -> None:
        self.count, self.scopes, self.broken, self.capability, self.mig = count, scopes, broken or {}, capability, mig
        self.fields = {185: 495_000, 186: 512_000, 83: 119_527_942, 82: 60, 74: 0, 269: 0, 270: 0, 271: 0}
        self.fields = fields if fields is not None else self.fields
        self.calls: dict[str, int] = {}
        self.gpm_values = {2: 83.0, 5: 21.0, 10: 77.0, 20: 10.0, 21: 30.0}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return getattr(pynvml, name)
        answer = ANSWERS.get(name)

        def call(*arguments: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            if name in self.broken:
                raise pynvml.NVMLError(self.broken[name])
            if answer is None:
                raise AssertionError(f"the adapter called {name}, which the fake does not know")
            return answer(self, *arguments)

        return call

    def field_values(self, handle: int, wanted: list[tuple[int, int]]) -> list[Any]:
        return [self._value(number, scope) for number, scope in wanted]

    def _value(self, number: int, scope: int) -> Any:
        value = pynvml.c_nvmlFieldValue_t()
        value.fieldId, value.scopeId = number, scope
        refused = number in (185, 186) and scope not in self.scopes
        if number not in self.fields or refused:
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
            return value
        value.nvmlReturn, value.valueType = pynvml.NVML_SUCCESS, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        value.value.ullVal = int(self.fields[number])
        return value

    def metrics(self, query: Any) -> Any:
        for slot in range(query.numMetrics):
            metric = query.metrics[slot]
            known = metric.metricId in self.gpm_values
            metric.nvmlReturn = pynvml.NVML_SUCCESS if known else pynvml.NVML_ERROR_NOT_SUPPORTED
            metric.value = self.gpm_values.get(metric.metricId, math.nan)
        return query


def _gpm_sample() -> Any:
    return ctypes.cast(ctypes.c_void_p(1), pynvml.c_nvmlGpmSample_t)


ANSWERS: dict[str, Any] = {
    "nvmlInit": lambda lib: None,
    "nvmlShutdown": lambda lib: None,
    "nvmlDeviceGetCount": lambda lib: lib.count,
    "nvmlDeviceGetHandleByIndex": lambda lib, index: index,
    "nvmlDeviceGetUUID": lambda lib, handle: f"GPU-{handle}",
    "nvmlDeviceGetName": lambda lib, handle: b"NVIDIA H200",
    "nvmlSystemGetDriverVersion": lambda lib: "580.159.04",
    "nvmlDeviceGetCudaComputeCapability": lambda lib, handle: lib.capability,
    "nvmlDeviceGetArchitecture": lambda lib, handle: 9,
    "nvmlDeviceGetFieldValues": FakeLibrary.field_values,
    "nvmlDeviceGetPowerUsage": lambda lib, handle: 480_000,
    "nvmlDeviceGetTotalEnergyConsumption": lambda lib, handle: 119_000_000,
    "nvmlDeviceGetEnforcedPowerLimit": lambda lib, handle: 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda lib, handle: 700_000,
    "nvmlDeviceGetPowerManagementLimitConstraints": lambda lib, handle: [200_000, 700_000],
    "nvmlDeviceGetMemoryInfo": lambda lib, handle: SimpleNamespace(total=150_754_820_096, used=644_000_000),
    "nvmlDeviceGetUtilizationRates": lambda lib, handle: SimpleNamespace(gpu=92, memory=79),
    "nvmlDeviceGetClockInfo": lambda lib, handle, kind: 1980 if kind == pynvml.NVML_CLOCK_SM else 3201,
    "nvmlDeviceGetTemperature": lambda lib, handle, kind: 44,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda lib, handle: 4,
    "nvmlDeviceGetMigMode": lambda lib, handle: [lib.mig, lib.mig],
    "nvmlDeviceGetComputeRunningProcesses": lambda lib, handle: [object()],
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda lib, handle: 5,
    "nvmlDeviceGetCurrPcieLinkWidth": lambda lib, handle: 16,
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda lib, handle: 5,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda lib, handle: 16,
    "nvmlGpmQueryDeviceSupport": lambda lib, handle: SimpleNamespace(isSupportedDevice=1),
    "nvmlGpmSampleAlloc": lambda lib: _gpm_sample(),
    "nvmlGpmSampleGet": lambda lib, handle, sample: sample,
    "nvmlGpmSampleFree": lambda lib, sample: None,
    "nvmlGpmMetricsGet": FakeLibrary.metrics,
}
