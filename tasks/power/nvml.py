"""The only module that talks to NVML. Distribution nvidia-ml-py, imported as pynvml.

What a device supports is asked once and remembered; a field that is not supported reads as None; anything else that
goes wrong is a SensorError that says what to do. Field numbers and units: nvml.h and nvidia-ml-py's pynvml.py.
"""

import importlib.metadata
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from tasks.errors import SensorError
from tasks.power.readings import Activity, GpuInfo
from tasks.records import PowerSample

FI_TOTAL_ENERGY = 83
FI_MEMORY_TEMPERATURE = 82
FI_SW_POWER_CAP = 74
FI_POWER_AVERAGE, FI_POWER_INSTANT = 185, 186
FI_SW_THERMAL, FI_HW_THERMAL, FI_HW_BRAKE = 269, 270, 271
SCOPE_GPU, SCOPE_MODULE = 0, 1
GPM_METRICS = {"sm": 2, "tensor": 5, "dram": 10, "pcie_tx": 20, "pcie_rx": 21, "nvlink_rx": 60, "nvlink_tx": 61}
GA100 = (8, 0)
"""Compute capability whose power readings are instantaneous, 25 ms of every 100 ms; no averaged field."""

T = TypeVar("T")


def refuse_deprecated_distribution(installed: Callable[[str], object] = importlib.metadata.version) -> None:
    """Raise SensorError when the abandoned distribution `pynvml` shadows nvidia-ml-py's module of the same name."""
    try:
        found = installed("pynvml")
    except importlib.metadata.PackageNotFoundError:
        return
    raise SensorError(
        f"the deprecated distribution pynvml {found} is installed and hides nvidia-ml-py's module; "
        "run: pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py"
    )


def open_nvml(library: Any = None) -> "Nvml | None":
    """NVML on this host, or None where there is no NVIDIA driver, library or device.

    `library` replaces the pynvml module in tests. Raises SensorError when NVML is there but does not work.
    """
    if library is None:
        refuse_deprecated_distribution()
        import pynvml

        library = pynvml
    try:
        library.nvmlInit()
        count = library.nvmlDeviceGetCount()
    except library.NVMLError as error:
        absent = (
            library.NVML_ERROR_LIBRARY_NOT_FOUND,
            library.NVML_ERROR_DRIVER_NOT_LOADED,
            library.NVML_ERROR_GPU_NOT_FOUND,
            library.NVML_ERROR_NOT_SUPPORTED,
            library.NVML_ERROR_NOT_FOUND,
        )
        if error.value in absent:
            return None
        raise SensorError(f"NVML does not start: {error}; {_advice(library, error)}") from error
    return Nvml(library, count) if count else None


def _advice(library: Any, error: Any) -> str:
    if error.value == getattr(library, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", None):
        return "the library and the loaded kernel module differ: reboot, or reload the nvidia modules"
    if error.value == getattr(library, "NVML_ERROR_NO_PERMISSION", None):
        return "give this user, or this container, access to the NVIDIA devices"
    if error.value == getattr(library, "NVML_ERROR_GPU_IS_LOST", None):
        return "the GPU fell off the bus: look for Xid in dmesg, then reset or replace it"
    return "try nvidia-smi on this machine"


class _Device:
    """What was learnt once about one GPU."""

    def __init__(self, index: int, handle: Any, uuid: str) -> None:
        self.index, self.handle, self.uuid = index, handle, uuid
        self.scope: Literal["gpu", "module", "none"] = "none"
        self.field: Literal["average", "instant", "none"] = "none"
        self.legacy_is_average = False
        self.fields: list[tuple[int, int]] = []
        self.unsupported: set[str] = set()
        self.gpm = False
        self.gpm_samples: list[Any] = []
        self.gpm_time_s: float | None = None
        self.slow: dict[str, Any] = {}


class Nvml:
    """A Sensor. `read` and `activity` may each be called from a thread of their own; close it when both are done."""

    def __init__(self, library: Any, count: int) -> None:
        self._nvml = library
        self.transient_errors = 0
        self._devices = {device.uuid: device for device in (self._probe(index) for index in range(count))}

    def __enter__(self) -> "Nvml":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the GPM samples and shut NVML down; errors on the way out do not matter."""
        for device in self._devices.values():
            for sample in device.gpm_samples:
                self._ask(device, "gpm_free", self._nvml.nvmlGpmSampleFree, sample)
            device.gpm_samples = []
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return

    def gpus(self) -> list[GpuInfo]:
        """Every GPU, described afresh."""
        return [self._describe(device) for device in self._devices.values()]

    def read(self, uuid: str, *, slow: bool = True) -> PowerSample:
        """One reading of `uuid`. Watts, MHz, degrees Celsius, joules, nanoseconds of throttling since driver load.

        Raises SensorError when the GPU is unknown or lost.
        """
        device, nvml = self._device(uuid), self._nvml
        now_s = time.time()
        values = self._field_values(device)
        average, instant = self._power(device, values)
        if slow or not device.slow:
            device.slow = self._slow_values(device)
        rates = self._ask(device, "utilization", nvml.nvmlDeviceGetUtilizationRates, device.handle)
        energy_mj = values.get(FI_TOTAL_ENERGY)
        if energy_mj is None:
            energy_mj = self._ask(device, "energy", nvml.nvmlDeviceGetTotalEnergyConsumption, device.handle)
        return PowerSample(
            time_s=now_s,
            gpu_uuid=uuid,
            power_average_w=average,
            power_instant_w=instant,
            energy_j=_scaled(energy_mj, 1e-3),
            sm_clock_mhz=self._clock(device, "sm_clock", nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._clock(device, "memory_clock", nvml.NVML_CLOCK_MEM),
            temperature_c=self._ask(
                device, "temperature", nvml.nvmlDeviceGetTemperature, device.handle, nvml.NVML_TEMPERATURE_GPU
            ),
            memory_temperature_c=values.get(FI_MEMORY_TEMPERATURE) or None,
            utilization=_scaled(None if rates is None else rates.gpu, 0.01),
            event_reasons=self._ask(
                device, "event_reasons", nvml.nvmlDeviceGetCurrentClocksEventReasons, device.handle
            ),
            throttle_sw_power_ns=values.get(FI_SW_POWER_CAP),
            throttle_sw_thermal_ns=values.get(FI_SW_THERMAL),
            throttle_hw_thermal_ns=values.get(FI_HW_THERMAL),
            throttle_hw_brake_ns=values.get(FI_HW_BRAKE),
            **device.slow,
        )

    def activity(self, uuid: str) -> Activity | None:
        """SM, tensor and DRAM activity (Hopper and newer: NVML GPM) and link traffic since the last call.

        The first call starts the interval and returns None; so does one within 0.1 s of the last (NVML's least).
        """
        device = self._device(uuid)
        if not device.gpm:
            return None
        now_s = time.monotonic()
        if device.gpm_time_s is not None and now_s - device.gpm_time_s < 0.1:
            return None
        if not device.gpm_samples:
            device.gpm_samples = [self._nvml.nvmlGpmSampleAlloc() for _ in range(2)]
        taken = self._ask(device, "gpm", self._nvml.nvmlGpmSampleGet, device.handle, device.gpm_samples[0])
        if taken is None:
            return None
        before_s, device.gpm_time_s = device.gpm_time_s, now_s
        device.gpm_samples.reverse()
        if before_s is None:
            return None
        return self._gpm_between(device, now_s - before_s)

    def _gpm_between(self, device: _Device, interval_s: float) -> Activity | None:
        nvml = self._nvml
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(GPM_METRICS)
        older, newer = device.gpm_samples
        query.sample1, query.sample2 = older, newer
        for slot, metric in enumerate(GPM_METRICS.values()):
            query.metrics[slot].metricId = metric
        if self._ask(device, "gpm", nvml.nvmlGpmMetricsGet, query) is None:
            return None
        found: dict[str, float] = {}
        for slot, name in enumerate(GPM_METRICS):
            if query.metrics[slot].nvmlReturn == nvml.NVML_SUCCESS:
                found[name] = float(query.metrics[slot].value)
        mib = 2**20 / 1e6
        return Activity(
            gpu_uuid=device.uuid,
            interval_s=interval_s,
            sm=_scaled(found.get("sm"), 0.01),
            dram=_scaled(found.get("dram"), 0.01),
            tensor=_scaled(found.get("tensor"), 0.01),
            pcie_rx_mb_s=_scaled(found.get("pcie_rx"), mib),
            pcie_tx_mb_s=_scaled(found.get("pcie_tx"), mib),
            nvlink_rx_mb_s=_scaled(found.get("nvlink_rx"), mib),
            nvlink_tx_mb_s=_scaled(found.get("nvlink_tx"), mib),
        )

    def _probe(self, index: int) -> _Device:
        """Ask once which of the fields this device answers, and from which scope its power comes."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            device = _Device(index, handle, _text(nvml.nvmlDeviceGetUUID(handle)))
        except nvml.NVMLError as error:
            raise SensorError(f"GPU {index} does not answer: {error}; {_advice(nvml, error)}") from error
        for name, scope in (("gpu", SCOPE_GPU), ("module", SCOPE_MODULE)):
            fields = [(FI_POWER_AVERAGE, scope), (FI_POWER_INSTANT, scope)]
            answers = self._values_of(device, fields)
            if any(value for value in answers.values()):
                device.scope = "gpu" if name == "gpu" else "module"
                device.fields = [field for field in fields if answers.get(field[0]) is not None]
                break
        rest = [(number, 0) for number in (FI_TOTAL_ENERGY, FI_MEMORY_TEMPERATURE, FI_SW_POWER_CAP)]
        rest += [(number, 0) for number in (FI_SW_THERMAL, FI_HW_THERMAL, FI_HW_BRAKE)]
        answers = self._values_of(device, rest)
        device.fields += [field for field in rest if answers.get(field[0]) is not None]
        self._probe_power(device)
        if hasattr(nvml, "nvmlGpmQueryDeviceSupport"):
            support = self._ask(device, "gpm", nvml.nvmlGpmQueryDeviceSupport, handle)
            device.gpm = bool(support is not None and support.isSupportedDevice)
        return device

    def _probe_power(self, device: _Device) -> None:
        nvml = self._nvml
        capability = self._ask(device, "compute", nvml.nvmlDeviceGetCudaComputeCapability, device.handle)
        pair = tuple(capability) if capability else (0, 0)
        device.legacy_is_average = pair > GA100
        if any(field[0] == FI_POWER_AVERAGE for field in device.fields) and pair != GA100:
            device.field = "average"
        elif any(field[0] == FI_POWER_INSTANT for field in device.fields):
            device.field = "instant"
        elif self._ask(device, "power", nvml.nvmlDeviceGetPowerUsage, device.handle):
            device.field = "average" if device.legacy_is_average else "instant"
            device.scope = "gpu"

    def _describe(self, device: _Device) -> GpuInfo:
        nvml, handle = self._nvml, device.handle
        limits: dict[str, Any] = dict(self._limits(device))
        bounds = self._ask(device, "limit_bounds", nvml.nvmlDeviceGetPowerManagementLimitConstraints, handle)
        memory = self._ask(device, "memory", nvml.nvmlDeviceGetMemoryInfo, handle)
        mig = self._ask(device, "mig", nvml.nvmlDeviceGetMigMode, handle)
        processes = self._ask(device, "processes", nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        link: dict[str, Any] = {
            name: self._ask(device, name, call, handle)
            for name, call in (
                ("pcie_generation", nvml.nvmlDeviceGetCurrPcieLinkGeneration),
                ("pcie_width", nvml.nvmlDeviceGetCurrPcieLinkWidth),
                ("pcie_max_generation", nvml.nvmlDeviceGetMaxPcieLinkGeneration),
                ("pcie_max_width", nvml.nvmlDeviceGetMaxPcieLinkWidth),
            )
        }
        return GpuInfo(
            index=device.index,
            uuid=device.uuid,
            name=_text(self._ask(device, "name", nvml.nvmlDeviceGetName, handle) or "unknown GPU"),
            driver=_text(self._ask(device, "driver", nvml.nvmlSystemGetDriverVersion) or "unknown"),
            memory_bytes=None if memory is None else int(memory.total),
            architecture=self._ask(device, "architecture", nvml.nvmlDeviceGetArchitecture, handle),
            min_limit_w=_scaled(bounds[0] if bounds else None, 1e-3),
            max_limit_w=_scaled(bounds[1] if bounds else None, 1e-3),
            power_field=device.field,
            power_scope=device.scope,
            mig=bool(mig and mig[0]),
            gpm=device.gpm,
            processes=None if processes is None else len(processes),
            capabilities=self._capabilities(device),
            **limits,
            **link,
        )

    def _capabilities(self, device: _Device) -> dict[str, bool]:
        have = {field[0] for field in device.fields}
        names = {
            "power_average_185": FI_POWER_AVERAGE,
            "power_instant_186": FI_POWER_INSTANT,
            "energy_83": FI_TOTAL_ENERGY,
            "memory_temperature_82": FI_MEMORY_TEMPERATURE,
            "sw_power_cap_74": FI_SW_POWER_CAP,
            "sw_thermal_269": FI_SW_THERMAL,
            "hw_thermal_270": FI_HW_THERMAL,
            "hw_brake_271": FI_HW_BRAKE,
        }
        return {**{name: number in have for name, number in names.items()}, "gpm": device.gpm}

    def _limits(self, device: _Device) -> dict[str, float | None]:
        nvml = self._nvml
        enforced = self._ask(device, "enforced_limit", nvml.nvmlDeviceGetEnforcedPowerLimit, device.handle)
        default = self._ask(device, "default_limit", nvml.nvmlDeviceGetPowerManagementDefaultLimit, device.handle)
        return {"enforced_limit_w": _scaled(enforced, 1e-3), "default_limit_w": _scaled(default, 1e-3)}

    def _slow_values(self, device: _Device) -> dict[str, Any]:
        memory = self._ask(device, "memory", self._nvml.nvmlDeviceGetMemoryInfo, device.handle)
        return {**self._limits(device), "memory_used_bytes": None if memory is None else int(memory.used)}

    def _power(self, device: _Device, values: dict[int, float]) -> tuple[float | None, float | None]:
        """(average, instant) in watts. A reading of 0 mW is no reading (zeus drops them too)."""
        average = _scaled(values.get(FI_POWER_AVERAGE) or None, 1e-3) if device.field == "average" else None
        instant = _scaled(values.get(FI_POWER_INSTANT) or None, 1e-3)
        if average is None and instant is None and device.field != "none":
            legacy = _scaled(
                self._ask(device, "power", self._nvml.nvmlDeviceGetPowerUsage, device.handle) or None, 1e-3
            )
            return (legacy, None) if device.legacy_is_average else (None, legacy)
        return average, instant

    def _clock(self, device: _Device, name: str, kind: int) -> float | None:
        return self._ask(device, name, self._nvml.nvmlDeviceGetClockInfo, device.handle, kind)

    def _field_values(self, device: _Device) -> dict[int, float]:
        return self._values_of(device, device.fields) if device.fields else {}

    def _values_of(self, device: _Device, fields: Sequence[tuple[int, int]]) -> dict[int, float]:
        """Field number to value, only those that answered with NVML_SUCCESS."""
        answers = self._ask(device, "fields", self._nvml.nvmlDeviceGetFieldValues, device.handle, list(fields))
        found: dict[int, float] = {}
        for answer in answers if answers is not None else ():
            if answer.nvmlReturn == self._nvml.NVML_SUCCESS:
                found[int(answer.fieldId)] = _value(answer)
        return found

    def _device(self, uuid: str) -> _Device:
        try:
            return self._devices[uuid]
        except KeyError:
            raise SensorError(f"no GPU {uuid} on this host; found {', '.join(self._devices) or 'none'}") from None

    def _ask(self, device: _Device, what: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """The answer, or None where unsupported (remembered) or briefly unavailable (counted)."""
        if what in device.unsupported:
            return None
        nvml = self._nvml
        try:
            return call(*arguments)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNINITIALIZED):
                raise SensorError(f"GPU {device.index} ({what}): {error}; {_advice(nvml, error)}") from error
            if error.value in (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_NO_PERMISSION,
                nvml.NVML_ERROR_INVALID_ARGUMENT,
                nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            ):
                device.unsupported.add(what)
            else:
                self.transient_errors += 1
            return None


def _value(answer: Any) -> float:
    """The member of the union that `valueType` names (nvmlValueType_t)."""
    member = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")[int(answer.valueType)]
    return float(getattr(answer.value, member))


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else float(value) * factor


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
