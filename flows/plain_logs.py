"""Errors worded for people reach Prefect's logs as their words; only faults of the program bring a traceback."""

import logging

from tasks.errors import RegenError

LOGGERS = ("prefect.flow_runs", "prefect.task_runs")
"""The loggers through which Prefect tells of a run that ended with an exception."""


class WordedErrors(logging.Filter):
    """Takes the traceback, and the evidence in the exception's repr, off a RegenError; the record.json has both."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always lets the record pass."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, RegenError):
            record.msg = record.getMessage().replace(repr(error), f"{type(error).__name__}: {error}")
            record.exc_info = record.exc_text = record.args = None
        return True


def install() -> None:
    """Once a process; again does nothing."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(found, WordedErrors) for found in logger.filters):
            logger.addFilter(WordedErrors())
