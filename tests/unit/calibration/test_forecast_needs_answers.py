"""A budget is held against a forecast of answers that ended here, also where calibration was cached and made none."""

from typing import Any

from flows.machines import FEWEST_ENDED, some_finished
from tasks.records import Progress


class Pool:
    """A pool in which one answer more ends at each look, up to `ends`."""

    def __init__(self, ends: int, total: int = 100, failed: bool = False) -> None:
        self.ends, self.total, self.failed, self.ended = ends, total, failed, 0

    def progress(self) -> Any:
        self.ended = min(self.ends, self.ended + 1)
        return Progress(total=self.total, done=self.ended, failed=0, in_flight=1, output_tokens=0, elapsed_s=0, tok_s=0)

    def lengths(self) -> tuple[list[float], list[float]]:
        return [1.0] * self.ended, []


async def test_it_waits_for_answers_and_no_longer() -> None:
    waiting = Pool(50)
    await some_finished(waiting)  # type: ignore[arg-type]
    assert waiting.ended == FEWEST_ENDED


async def test_it_does_not_wait_for_what_cannot_come() -> None:
    await some_finished(Pool(0, failed=True))  # type: ignore[arg-type]
    await some_finished(Pool(2, total=2))  # type: ignore[arg-type]
