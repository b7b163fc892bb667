"""A budget is held against a forecast of answers that ended here, also where calibration was cached and made none."""

import asyncio
from typing import Any

import pytest

from flows.machines import FEWEST_ENDED, some_finished
from tasks.records import Progress


class Pool:
    """A pool in which one answer more ends at each look, up to `ends`."""

    def __init__(self, ends: int, total: int = 100, failed: bool = False, in_flight: int = 1) -> None:
        self.ends, self.total, self.failed, self.ended, self.in_flight = ends, total, failed, 0, in_flight

    def progress(self) -> Any:
        self.ended = min(self.ends, self.ended + 1)
        counts = {"total": self.total, "done": self.ended, "failed": 0, "in_flight": self.in_flight}
        return Progress(**counts, output_tokens=0, elapsed_s=0, tok_s=0)

    def lengths(self) -> tuple[list[float], list[float]]:
        return [1.0] * self.ended, []


async def test_it_waits_for_answers_and_no_longer() -> None:
    waiting = Pool(50)
    await some_finished(waiting)  # type: ignore[arg-type]
    assert waiting.ended == FEWEST_ENDED


async def test_it_does_not_wait_for_what_cannot_come() -> None:
    await some_finished(Pool(0, failed=True))  # type: ignore[arg-type]
    await some_finished(Pool(2, total=2))  # type: ignore[arg-type]


async def test_a_pool_that_stands_still_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.machines.STILL_S", 0.3)
    standing = Pool(FEWEST_ENDED - 1, in_flight=0)  # its finished chunks wait for what comes after the gate
    await asyncio.wait_for(some_finished(standing), 20)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):  # nothing ended and nothing in flight: servers that start again, for example
        await asyncio.wait_for(some_finished(Pool(0, in_flight=0)), 1.5)  # type: ignore[arg-type]
