"""How a command ends: an exit status and, on every exit but SIGKILL, one last line of JSON on stdout."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from tasks.errors import GateError, RegenError

INTERRUPTED = 130
SHOWN_FRAMES = -4
"""Innermost frames of an unexpected error; the outer ones are click's and Prefect's."""


class Outcome(Exception):
    """Raised (or returned) by a command: `payload` becomes the last line, `status` the exit status."""

    def __init__(self, payload: dict[str, Any], status: int = 0) -> None:
        super().__init__(status)
        self.payload = payload
        self.status = status


def run_command(group: click.Group, arguments: list[str]) -> int:
    """Run `group` with `arguments`; map what happens to the documented exit statuses."""
    try:
        result = group.main(arguments, prog_name="regen", standalone_mode=False)
    except Outcome as outcome:
        return finish(outcome.payload, outcome.status)
    except click.exceptions.Exit as stop:
        return int(stop.exit_code)
    except click.ClickException as error:
        error.show()
        return finish({"error": error.format_message(), "kind": "usage"}, 2)
    except RegenError as error:
        return _failed(error)
    except (KeyboardInterrupt, click.Abort):
        return _interrupted()
    except Exception as error:
        return _unexpected(error)
    except BaseException as error:
        if not _is_termination(error):
            raise
        return _interrupted()
    if isinstance(result, Outcome):
        return finish(result.payload, result.status)
    if isinstance(result, dict):
        return finish(result, 0)
    return result if isinstance(result, int) else 0


def finish(payload: dict[str, Any], status: int) -> int:
    """Print the last line; a closed stdout (`| head`) is not an error."""
    try:
        print(json.dumps(payload, default=str), flush=True)
    except BrokenPipeError:
        sys.stdout = None  # type: ignore[assignment]
    return status


def _interrupted() -> int:
    print("interrupted: finished answers are kept; the same command goes on from there", file=sys.stderr)
    return finish({"error": "interrupted", "kind": "interrupted"}, INTERRUPTED)


def _is_termination(error: BaseException) -> bool:
    """Whether Prefect raised `error` for a SIGTERM during a flow; told by name, for most commands never import it."""
    kind = type(error)
    return kind.__module__ == "prefect.exceptions" and kind.__name__ == "TerminationSignal"


def _unexpected(error: Exception) -> int:
    """An error of this program, or a RegenError that came out of a task group: a last line all the same."""
    import traceback

    meant = next((leaf for leaf in _leaves(error) if isinstance(leaf, RegenError)), None)
    if meant is not None:
        return _failed(meant)
    traceback.print_exception(error, limit=SHOWN_FRAMES, chain=False)
    print("this is a fault of the program, not of your input; what was finished is kept", file=sys.stderr)
    return finish({"error": str(error) or type(error).__name__, "kind": type(error).__name__}, RegenError.exit_status)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _failed(error: RegenError) -> int:
    print(f"error: {error}", file=sys.stderr)
    payload: dict[str, Any] = {"error": str(error), "kind": type(error).__name__}
    if isinstance(error, GateError) and error.report:
        payload["report"] = error.report
    return finish(payload, error.exit_status)
