"""Health is progress. A wedged scheduler answers /health with 200 and /v1/loads with stale numbers; one that compiles
kernels fails /health although it is sound. So three things are looked at: whether the process lives, how old the
scheduler's heartbeat is (/v1/loads: outer timestamp − loads[0].timestamp; at most 0.12 s when healthy, growing second
for second when it hangs), and whether tokens come while requests are in flight.

Pure: time comes with the samples.
"""

from dataclasses import dataclass
from enum import StrEnum

from tasks.records import ServiceSample

UNREACHABLE_S = 10.0
"""No answer for so long counts as down. A killed scheduler leaves about 6 s of silence before the process ends."""
SUSPECT_AGE_S = 5.0
"""A heartbeat older than this is worth a line in the log, not yet a restart."""


class State(StrEnum):
    """What the supervisor thinks of one server."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    HUNG = "hung"
    UNREACHABLE = "unreachable"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Health:
    """A state and the evidence for it."""

    state: State
    reason: str = ""

    @property
    def down(self) -> bool:
        """Whether no requests should be sent."""
        return self.state in (State.HUNG, State.UNREACHABLE, State.DEAD)


class HealthMonitor:
    """Judges one server from its samples.

    `hang_timeout_s`: how long nothing may move while requests are in flight. `unreachable_s`: how long it may be
    silent. `counters`: whether its counters move while requests run (SGLang's do; llama.cpp counts tokens only when a
    request ends, but answers from the loop that computes, so that its answer is the progress).
    """

    def __init__(self, hang_timeout_s: float, unreachable_s: float = UNREACHABLE_S, counters: bool = True) -> None:
        self.hang_timeout_s = hang_timeout_s
        self.unreachable_s = min(unreachable_s, hang_timeout_s)
        self.counters = counters
        self.restart()

    def restart(self) -> None:
        """Forget everything: the server was started again."""
        self._answered_s: float | None = None
        self._moved_s: float | None = None
        self._seen: tuple[float | int | None, ...] = ()

    def observe(self, sample: ServiceSample, process_end: str | None = None) -> Health:
        """Judge the present. `process_end` says how the process ended, where it did."""
        now = sample.time_s
        if process_end is not None:
            return Health(State.DEAD, process_end)
        if self._answered_s is None:
            self._answered_s = now
        if not sample.alive:
            silent = now - self._answered_s
            if silent >= self.unreachable_s:
                return Health(State.UNREACHABLE, f"no answer for {silent:.0f} s")
            return Health(State.SUSPECT, "no answer")
        self._answered_s = now
        return self._progress(sample, now)

    def _progress(self, sample: ServiceSample, now: float) -> Health:
        age = sample.heartbeat_age_s
        if age is not None and age >= self.hang_timeout_s:
            return Health(State.HUNG, f"the scheduler's heartbeat is {age:.0f} s old")
        busy = (sample.running or 0) + (sample.queued or 0) > 0
        seen = _moving(sample)
        if self._moved_s is None or not busy or seen != self._seen:
            self._moved_s, self._seen = now, seen
        still = now - self._moved_s
        if busy and self.counters and sample.generated_tokens_total is not None and still >= self.hang_timeout_s:
            return Health(State.HUNG, f"{sample.running} requests in flight, not one token for {still:.0f} s")
        if age is not None and age >= SUSPECT_AGE_S:
            return Health(State.SUSPECT, f"the scheduler's heartbeat is {age:.0f} s old")
        return Health(State.HEALTHY)


def _moving(sample: ServiceSample) -> tuple[float | int | None, ...]:
    """Whatever changes while work is done: tokens out and in (a long prefill is progress too); and, since 0.5.11
    counts tokens only when a request ends, the cache's use, the gauge of speed and the requests themselves."""
    return (
        sample.generated_tokens_total,
        sample.prompt_tokens_total,
        sample.kv_usage,
        sample.gen_throughput_tok_s,
        sample.running,
        sample.queued,
    )


def backoff_s(restarts: int) -> float:
    """Pause before the next restart: 2, 4, 8 … 300 s."""
    return float(min(300, 2 ** (restarts + 1)))
