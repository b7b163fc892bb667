"""One class per boundary. A message says what was found, what was expected and what to do next.

RegenError                       exit status
├── SpecError                    2   the run's description does not fit together
├── DatasetError                 2   a source cannot be read at all (a bad *row* is data, never an exception)
├── TargetError                  2   tokenizer, chat template or model files do not fit the target
├── GateError                    3   a gate said no; carries its report
├── VerificationError            3   bytes, rows or digests differ from what was written
├── ServerError                  4   an inference server could not be started, reached or kept alive
├── SensorError                  4   NVML answered with an error that is not "no NVIDIA here"
├── StorageError                 4   a bucket or disk refused
└── ControlPlaneError            4   the Prefect server or another control service is not there
"""

from typing import Any


class RegenError(Exception):
    """Base of every error a user is meant to read; `exit_status` is what the command line returns."""

    exit_status = 4


class SpecError(RegenError):
    """The run's description is invalid, or would change the data of a run that already exists."""

    exit_status = 2


class DatasetError(RegenError):
    """A source cannot be read: wrong path, unreadable bucket, unknown format, nothing in it."""

    exit_status = 2


class TargetError(RegenError):
    """The target's tokenizer, chat template or config is missing or inconsistent."""

    exit_status = 2


class GateError(RegenError):
    """A gate in `enforce` mode stopped the run. `report` is the gate's JSON-able evidence."""

    exit_status = 3

    def __init__(self, message: str, report: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.report = report or {}


class VerificationError(RegenError):
    """Published or local bytes differ from their manifest."""

    exit_status = 3


class ServerError(RegenError):
    """An inference server failed. `log_path` names the file to read, where there is one."""

    def __init__(self, message: str, log_path: str | None = None) -> None:
        super().__init__(message)
        self.log_path = log_path


class SensorError(RegenError):
    """A power or clock sensor failed in a way that is not simply "unsupported"."""


class StorageError(RegenError):
    """An object store or a disk refused an operation for good (after retries)."""


class ControlPlaneError(RegenError):
    """The Prefect server, its database or a worker could not be reached or started."""
