"""Requests in flight per server: backs off under pressure, comes back when calm. No clock, no I/O."""

from dataclasses import dataclass, field

from tasks.records import ServiceSample

KV_HIGH = 0.9
KV_CALM = 0.85
QUEUE_SHARE = 0.05  # of the limit may wait inside the server without being pressure
CALM_SAMPLES = 3
STEP_UP = 0.05
LEAST = 1


@dataclass(slots=True)
class LimitController:
    """`observe(sample)` returns the limit from now on, between 1 and `target` (the calibrated value).

    Lowered by a tenth when requests were retracted or the KV pool is over 0.9; lowered to what runs when a queue
    inside the server persists over two readings. Raised by a twentieth of the target after three calm readings.
    """

    target: int
    limit: int = field(init=False)
    _retracted: float | None = field(init=False, default=None)
    _queued: int = field(init=False, default=0)
    _calm: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.limit = self.target

    def set_target(self, target: int) -> None:
        """A new calibrated value: start from there."""
        self.target = max(LEAST, target)
        self.limit = self.target
        self._queued = self._calm = 0

    def observe(self, sample: ServiceSample) -> int:
        """One reading of the server's counters; what it does not tell is no pressure."""
        retracted = self._new_retractions(sample)
        queued = sample.queued or 0
        queue_stays = min(queued, self._queued) > max(1.0, QUEUE_SHARE * self.limit)
        self._queued = queued
        kv = sample.kv_usage or 0.0
        if retracted or kv > KV_HIGH:
            self._lower(int(self.limit * 0.9))
        elif queue_stays and sample.running:
            self._lower(min(self.limit, sample.running + max(1, int(QUEUE_SHARE * self.limit))))
        elif kv < KV_CALM and queued <= 1:
            self._calm += 1
            if self._calm >= CALM_SAMPLES and self.limit < self.target:
                self.limit = min(self.target, self.limit + max(1, int(STEP_UP * self.target)))
                self._calm = 0
        else:
            self._calm = 0
        return self.limit

    def refused(self, running: int) -> int:
        """The server said "later" (429, 503) with `running` requests in flight: that is its limit for now."""
        self._lower(max(LEAST, running))
        return self.limit

    def _new_retractions(self, sample: ServiceSample) -> bool:
        before, self._retracted = self._retracted, sample.retracted_total
        return before is not None and sample.retracted_total is not None and sample.retracted_total > before

    def _lower(self, limit: int) -> None:
        self.limit = max(LEAST, min(self.limit, limit))
        self._calm = 0
        self._queued = 0
