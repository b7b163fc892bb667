"""One prompt on its way to an answer, and the pool it waits in."""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from tasks.generation.sampling import Arm
from tasks.records import Message, Prompt


@dataclass(slots=True)
class Job:
    """State of one row. `turn` counts regenerated assistant turns, `attempt` the attempts at this one."""

    chunk: int
    row: int  # inside the chunk
    prompt: Prompt
    arm: Arm
    answers: list[Message] = field(default_factory=list)
    turn: int = 0
    attempt: int = 0
    first_attempt: int = 0  # a row that is run again continues its seeds with fresh attempts
    requeues: int = 0
    max_tokens: int | None = None
    attempts_total: int = 0

    def next_turn(self) -> None:
        """The next question of the same conversation starts with fresh attempts."""
        self.turn += 1
        self.attempt = self.first_attempt = self.requeues = 0
        self.max_tokens = None


class Pool:
    """Continued conversations and moved requests first, then new prompts in order; delayed jobs when due."""

    def __init__(self) -> None:
        self._urgent: deque[Job] = deque()
        self._new: deque[Job] = deque()
        self._delayed: list[tuple[float, int, Job]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._new) + len(self._delayed)

    @property
    def waiting_new(self) -> int:
        """Prompts that were not sent yet."""
        return len(self._new)

    def add(self, job: Job) -> None:
        """A new prompt."""
        self._new.append(job)

    def put_back(self, job: Job, ready_s: float | None = None) -> None:
        """A job that was already sent once; at the time `ready_s`, or at once."""
        if ready_s is None:
            self._urgent.append(job)
        else:
            heapq.heappush(self._delayed, (ready_s, next(self._order), job))

    def take(self, now_s: float) -> Job | None:
        """The next job to send, or None."""
        while self._delayed and self._delayed[0][0] <= now_s:
            self._urgent.append(heapq.heappop(self._delayed)[2])
        if self._urgent:
            return self._urgent.popleft()
        return self._new.popleft() if self._new else None

    def next_ready_s(self) -> float | None:
        """When the earliest delayed job may go."""
        return self._delayed[0][0] if self._delayed else None

    def clear(self) -> list[Job]:
        """Take everything out (the run stops)."""
        jobs = [*self._urgent, *self._new, *(entry[2] for entry in self._delayed)]
        self._urgent.clear()
        self._new.clear()
        self._delayed.clear()
        return jobs
