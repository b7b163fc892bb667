"""One server as the engine sees it: its client, its limit, what it holds, and whether it may be sent to."""

import asyncio
import math
from dataclasses import dataclass, field
from enum import StrEnum

from tasks.client.chat import ChatClient
from tasks.generation.controller import LimitController
from tasks.generation.jobs import Job
from tasks.records import Server, ServiceSample


class State(StrEnum):
    """Whether requests go to a server."""

    UP = "up"
    SUSPECT = "suspect"  # a connection broke; a probe is on its way
    DOWN = "down"  # ejected; probed until it answers again
    GONE = "gone"  # removed


@dataclass(slots=True)
class Flight:
    """One request in flight. `fate` says what a cancellation means: requeue elsewhere, or drop (the run stops)."""

    job: Job
    request_id: str
    begun_s: float
    task: "asyncio.Task[None] | None" = None
    fate: str = ""


@dataclass(slots=True)
class Line:
    """All of it belongs to the engine's loop."""

    server: Server
    client: ChatClient
    controller: LimitController
    ramp_s: float = 0.0
    ramp_from_s: float = 0.0
    state: State = State.UP
    reason: str = ""
    flights: dict[str, Flight] = field(default_factory=dict)
    hold_until_s: float = 0.0
    bad_in_a_row: int = 0
    timeouts_in_a_row: int = 0
    ejections: int = 0
    sample: ServiceSample | None = None
    tokens_seen: float = -1.0
    progress_s: float = 0.0
    suspicion: "asyncio.Future[bool] | None" = None
    watching: int = 0  # calibration windows being measured: the limit is theirs

    def allowed(self, now_s: float) -> int:
        """Requests in flight allowed now: the controller's limit, less while ramping up, none while not up."""
        if self.state is not State.UP or now_s < self.hold_until_s:
            return 0
        limit = self.controller.target if self.watching else self.controller.limit
        passed = now_s - self.ramp_from_s
        if passed >= self.ramp_s:
            return limit
        return max(1, math.ceil(limit * passed / self.ramp_s))

    def free(self, now_s: float) -> int:
        """Slots that may be filled now."""
        return self.allowed(now_s) - len(self.flights)

    def ramping(self, now_s: float) -> bool:
        """Whether `allowed` will grow by itself."""
        return self.state is State.UP and (now_s - self.ramp_from_s < self.ramp_s or now_s < self.hold_until_s)


def least_loaded(lines: list[Line], now_s: float) -> Line | None:
    """The line with the most free slots; on a tie the one with the smaller share in use."""
    best, best_key = None, (0, 0.0)
    for line in lines:
        free = line.free(now_s)
        if free > 0:
            key = (free, -len(line.flights) / max(1, line.controller.limit))
            if best is None or key > best_key:
                best, best_key = line, key
    return best
