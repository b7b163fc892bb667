"""Who wants to know how a run goes: the flow publishes, a terminal (or a notebook) listens. Same process only."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.records import Progress

log = logging.getLogger(__name__)

Listener = Callable[[Progress], None]

listeners: list[Listener] = []
"""Called with every new Progress, from the thread that publishes it. Use `listening` to add one for a while."""


def publish(progress: Progress) -> None:
    """Hand `progress` to every listener; one that fails is logged and never disturbs the run."""
    for listener in tuple(listeners):
        try:
            listener(progress)
        except Exception as error:
            log.warning("a progress listener failed: %s", error)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Listen inside the `with` block."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
