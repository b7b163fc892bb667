"""When the hardware is believed."""

from pydantic import Field

from tasks.settings import Mode, Settings, Share


class PowerSettings(Settings):
    """The power gate. Progress and throughput decide, power explains."""

    gate: Mode = Field("enforce", title="Power gate", description="Stop on critical verdicts, or only report them.")
    sample_hz: float = Field(5.0, gt=0, le=20, title="Sampling", description="NVML readings a second.")
    probe_s: float = Field(45.0, gt=0, title="Probe", description="Seconds of fixed work for the baseline gate.")
    probe_output_tokens: int = Field(512, ge=16, title="Probe length", description="Fixed answers, ignore_eos.")
    idle_s: float = Field(10.0, ge=0, title="Idle window", description="Loaded but without requests.")
    retries: int = Field(1, ge=0, title="Second probes", description="Before a run is stopped.")
    band_same_board: Share = Field(0.08, title="Band, same board", description="Least relative tolerance.")
    band_other_board: Share = Field(0.15, title="Band, other board", description="Same SKU, other UUID.")
    live_window_s: float = Field(60.0, gt=0, title="Live window", description="Sliding window during generation.")
    accept_baseline: bool = Field(True, title="Write baselines", description="When the run is known good.")
