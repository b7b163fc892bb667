"""`regen`: one command line. Commands are imported only when used, so that `regen --help` answers at once."""

import importlib
import sys
from typing import Any

import click

COMMANDS = {
    "demo": ("flows.commands.demo", "Regenerate a small data set on this machine, end to end, with a real CPU model."),
    "run": ("flows.commands.run", "Run a job file here, in this process, against the configured Prefect server."),
    "validate": ("flows.commands.validate", "May I train on this? Judge prompts or tokenized rows."),
    "export": ("flows.commands.export", "Write a run's rows in the form that a trainer reads."),
    "fit": ("flows.commands.fit", "Plan a server's memory: requests, context and fraction for one GPU."),
    "power": ("flows.commands.power", "Show what the GPUs draw, and what limits them."),
    "diagnose": ("flows.commands.diagnose", "Why is the GPU starved? Profile a running server."),
    "calibrate": ("flows.commands.calibrate", "Find the best number of requests in flight for running servers."),
    "status": ("flows.commands.status", "Where a run stands."),
    "report": ("flows.commands.report", "Write a run's HTML report."),
    "verify": ("flows.commands.verify", "Re-read a published set or a run, byte by byte."),
}


class LazyGroup(click.Group):
    """Looks commands up in COMMANDS; imports a command's module when it is invoked."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the mission."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command object, `command` in its module."""
        if cmd_name not in COMMANDS:
            return None
        command: Any = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command  # type: ignore[no-any-return]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Names and one line each, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="drafter-regen")
def cli() -> None:
    """Regenerate a target model's own completions to train its drafter.

    Exit status: 0 success, 2 usage or input, 3 a gate or verification failed, 4 infrastructure, 130 interrupted.
    The last line of stdout is one JSON object.

    Example: regen demo --limit 8 --out out/demo
    """


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; print the last line of JSON; return the exit status."""
    from flows.outcome import run_command

    return run_command(cli, arguments)


if __name__ == "__main__":
    main()
