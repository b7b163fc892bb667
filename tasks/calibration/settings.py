"""How hard to drive the servers, and what the run may cost."""

from typing import Literal

from pydantic import Field

from tasks.settings import Settings, Share


class CalibrationSettings(Settings):
    """Search for requests in flight, then forecast."""

    enabled: bool = Field(True, title="Calibrate", description="Off: use the start value as it is.")
    start: int = Field(4, ge=1, title="Start", description="Requests in flight a server to begin with.")
    limit: int = Field(512, ge=1, title="Most", description="Requests in flight a server never exceeded.")
    window_s: float = Field(20.0, gt=0, title="Window", description="Least seconds of steady measurement.")
    max_window_s: float = Field(120.0, gt=0, title="Longest window", description="Give up waiting for a steady state.")
    min_gain: Share = Field(0.03, title="Least gain", description="Stop doubling below this relative gain.")
    look_beyond: int = Field(
        1, ge=0, title="Look beyond", description="Doublings measured after the first that gains too little."
    )
    tolerance: Share = Field(0.02, title="Tolerance", description="Smallest concurrency within this of the peak.")
    compare_mtp_steps: tuple[int, ...] = Field((), title="Compare MTP", description="Draft steps to try, 0 = off.")
    use_cache: bool = Field(True, title="Reuse", description="A result with the same key is not measured again.")


class BudgetSettings(Settings):
    """What the forecast is held against."""

    deadline_h: float | None = Field(
        None, gt=0, title="Deadline", description="Hours of generation, all starts of a run together."
    )
    max_cost: float | None = Field(None, gt=0, title="Most cost", description="In the price's currency.")
    price_per_gpu_hour: float | None = Field(None, ge=0, title="Price", description="Of one GPU for an hour.")
    price_per_kwh: float | None = Field(None, ge=0, title="Energy price", description="Of one kWh.")
    over_budget: Literal["fail", "approve"] = Field(
        "fail", title="Over budget", description="Fail, or pause for a person's approval in the UI."
    )
    approval_timeout_s: int = Field(86_400, ge=60, title="Approval timeout", description="Seconds a person has.")
