"""Start the servers of one node: the first alone, with the ladder; the others beside each other with what it found."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.errors import ServerError
from tasks.provisioning.start import Recipe, Started, Starter
from tasks.records import GpuFacts

log = logging.getLogger(__name__)

Place = tuple[Recipe, tuple[GpuFacts, ...]]
"""What is to be started, and on which GPUs."""

Placed = tuple[Started, Recipe, tuple[GpuFacts, ...]]


@dataclass(slots=True)
class Losses:
    """Servers that may stay away: none, unless `least` servers are enough. `events` tells which did, and why."""

    total: int
    least: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)

    def go_on_without(self, recipe: Recipe, error: ServerError, starter: Starter) -> None:
        """Note that this server stays away. Raises the error where that is not allowed, or the start was cancelled."""
        allowed = 0 if self.least is None else max(0, self.total - self.least)
        if starter.cancel.is_set() or len(self.events) >= allowed:
            raise error
        reason = str(error)
        event = {"time_s": time.time(), "event": "server.lost_at_start", "server": recipe.name, "reason": reason}
        self.events.append({**event, "gpus": list(recipe.gpu_uuids)})
        starter.say(f"{recipe.name} does not start, the run goes on without it: {reason}")
        log.warning(
            "%s (GPUs %s) does not start, the run goes on without it: %s", recipe.name, recipe.gpu_uuids, reason
        )


def start_together(starter: Starter, places: Sequence[Place], losses: Losses) -> list[Placed]:
    """Every server that starts, in order. Raises the first ServerError that `losses` does not allow, and ends them."""
    done: list[Placed] = []
    try:
        waiting = list(places)
        while not done:
            recipe, group = waiting.pop(0)
            try:
                done.append((starter.start(recipe), recipe, group))
            except ServerError as error:
                losses.go_on_without(recipe, error, starter)
        config = done[0][0].config
        assert config is not None
        rest = [(replace(recipe, config=config), group) for recipe, group in waiting]
        if rest:
            _start_rest(starter, rest, losses, done)
    except BaseException:
        for one, _, _ in done:
            one.running.stop()
        raise
    return done


def _start_rest(starter: Starter, places: Sequence[Place], losses: Losses, done: list[Placed]) -> None:
    with ThreadPoolExecutor(len(places)) as pool:
        futures = [pool.submit(starter.start, recipe) for recipe, _ in places]
    errors: list[tuple[Recipe, BaseException]] = []
    for future, (recipe, group) in zip(futures, places, strict=True):
        if (error := future.exception()) is None:
            done.append((future.result(), recipe, group))
        else:
            errors.append((recipe, error))
    for recipe, error in errors:  # after all that started are known, so that they can be ended
        if not isinstance(error, ServerError):
            raise error
        losses.go_on_without(recipe, error, starter)
