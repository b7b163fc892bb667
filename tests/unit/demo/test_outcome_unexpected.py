"""Every exit has a last line of JSON, also one that nobody meant."""

import json

import click
import pytest
from prefect.exceptions import TerminationSignal

from flows.outcome import run_command
from tasks.errors import GateError


def group_that_raises(error):
    @click.group()
    def group():
        pass

    @group.command()
    def go():
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ExceptionGroup("tasks", [ExceptionGroup("inner", [GateError("too slow")])]), 3, "GateError"),
        (ExceptionGroup("tasks", [ValueError("odd")]), 4, "ExceptionGroup"),
        (ZeroDivisionError(), 4, "ZeroDivisionError"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (TerminationSignal(signal=15), 130, "interrupted"),
    ],
)
def test_the_last_line_is_json(error, status, kind, capsys):
    assert run_command(group_that_raises(error), ["go"]) == status
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kind"] == kind
