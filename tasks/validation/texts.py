"""User texts of the benchmark files that must not be in the training data."""

from collections.abc import Iterator
from pathlib import Path

from tasks.validation.canonical import conversation
from tasks.validation.plan import units
from tasks.validation.policy import Policy
from tasks.validation.reasons import RowError
from tasks.validation.settings import SourceSettings
from tasks.validation.sources import resolve
from tasks.validation.worker import unit_rows


def benchmark_texts(settings: SourceSettings, downloads: Path) -> Iterator[str]:
    """Every user text of `settings.decontaminate`. Raises DatasetError when a file cannot be read."""
    if not settings.decontaminate:
        return
    endpoint = settings.s3_endpoint_url
    reading = SourceSettings(paths=settings.decontaminate, split=settings.split, s3_endpoint_url=endpoint)
    policy = Policy(reading, None)
    for unit in units(resolve(reading, downloads), reading):
        for _, value in unit_rows(unit, policy):
            if isinstance(value, RowError):
                continue
            try:
                turns, _ = conversation(value, columnar=unit.columnar)
            except RowError:
                continue
            yield from (turn[1] for turn in turns if turn[0] == "user")
