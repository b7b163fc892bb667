"""What a sensor says, as plain values. Nothing here knows NVML, so every rule is testable on recorded readings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Literal, Protocol

from tasks.records import PowerSample

UPDATE_PERIOD_S = 0.1
"""NVML renews power and energy about every 100 ms (measured over >70 GPUs: arXiv 2312.02741 and its data)."""


class EventReason(IntFlag):
    """Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h). SW_POWER_CAP is no proof of being at the limit: it was
    seen at a mean of 475 W of 700 W."""

    GPU_IDLE = 0x1
    APP_CLOCKS = 0x2
    SW_POWER_CAP = 0x4
    HW_SLOWDOWN = 0x8
    SYNC_BOOST = 0x10
    SW_THERMAL = 0x20
    HW_THERMAL = 0x40
    HW_POWER_BRAKE = 0x80
    DISPLAY_CLOCKS = 0x100


def reason_names(bits: int | None) -> list[str]:
    """Names of the set bits; unknown bits as hex, so that a newer driver is still readable."""
    if not bits:
        return []
    known = [reason.name or "" for reason in EventReason if bits & reason]
    rest = bits & ~sum(EventReason)
    return known + ([hex(rest)] if rest else [])


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU as the driver describes it. Limits in watts; `unsupported` says why its power cannot be judged."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_bytes: int | None = None
    architecture: int | None = None
    enforced_limit_w: float | None = None
    default_limit_w: float | None = None
    min_limit_w: float | None = None
    max_limit_w: float | None = None
    power_field: Literal["average", "instant", "none"] = "none"
    power_scope: Literal["gpu", "module", "none"] = "none"
    mig: bool = False
    gpm: bool = False
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_generation: int | None = None
    pcie_max_width: int | None = None
    processes: int | None = None
    capabilities: Mapping[str, bool] = field(default_factory=dict)

    @property
    def unsupported(self) -> str | None:
        """Why power readings of this device say nothing about one server, or None when they do."""
        if self.mig:
            return "MIG is on: NVML power is that of the whole board, not of a slice"
        if self.power_scope == "module":
            return "only module power (CPU and GPU together) can be read"
        if self.power_field == "none":
            return "the driver gives no power reading for this device"
        return None

    @property
    def sku(self) -> str:
        """Board name and memory, as a key (never used to look up a limit)."""
        memory = f" {round(self.memory_bytes / 2**30)}GiB" if self.memory_bytes else ""
        return f"{self.name}{memory}"


@dataclass(frozen=True, slots=True)
class Activity:
    """Hardware counters between two readings: fractions in 0..1, link traffic in MB/s. None where not given."""

    gpu_uuid: str
    interval_s: float
    sm: float | None = None
    dram: float | None = None
    tensor: float | None = None
    pcie_rx_mb_s: float | None = None
    pcie_tx_mb_s: float | None = None
    nvlink_rx_mb_s: float | None = None
    nvlink_tx_mb_s: float | None = None


class Sensor(Protocol):
    """What the rest of the room needs from NVML; a recorded or made-up sensor has the same four methods."""

    def gpus(self) -> list[GpuInfo]:
        """Every GPU of this host, described afresh (limits and processes change)."""

    def read(self, uuid: str, *, slow: bool = True) -> PowerSample:
        """One reading. `slow` renews the fields that rarely change (limits, memory)."""

    def activity(self, uuid: str) -> Activity | None:
        """Counters since the last call for this GPU; None on the first call and where unsupported."""

    def close(self) -> None:
        """Release the sensor."""
