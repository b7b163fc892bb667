"""What a person sees in the terminal: a progress bar while the run goes (stderr), a table at its end (stdout)."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from flows.progress import listening
from flows.reporter import describe, finished
from tasks.cuts import cut_text, plural
from tasks.records import Progress

PLAIN_EVERY_S = 10.0
"""Seconds between lines where stderr is not a terminal."""


@contextmanager
def progress_bar(console: Console) -> Iterator[None]:
    """Show every Progress that the run publishes, in place on a terminal, as a line now and then elsewhere."""
    if not console.is_terminal:
        with listening(_PlainLines(console)):
            yield
        return
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, TextColumn("{task.fields[note]}"), console=console) as bar:
        task = bar.add_task("preparing", total=None, note="validation, servers, gates, calibration")

        def show(progress: Progress) -> None:
            settled = progress.done + progress.failed
            note = f"{progress.tok_s:,.0f} tok/s"
            note += f", {progress.failed:,} failed" if progress.failed else ""
            note += f", about {progress.eta_s[0]:,.0f} s left" if progress.eta_s and not finished(progress) else ""
            bar.update(task, description="answers", completed=settled, total=progress.total, note=note)

        with listening(show):
            yield


class _PlainLines:
    def __init__(self, console: Console) -> None:
        self._console, self._next_s, self._last = console, 0.0, ""

    def __call__(self, progress: Progress) -> None:
        text = describe(progress)
        if text != self._last and (finished(progress) or time.monotonic() >= self._next_s):
            self._console.print(text, highlight=False, soft_wrap=True)
            self._next_s, self._last = time.monotonic() + PLAIN_EVERY_S, text


def summary_table(result: Mapping[str, Any]) -> Table:
    """Counts and places of one finished demo."""
    table = Table(title=f"Run {result['run_id']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    ui = "ended; repeat with --keep-ui to look at every run so far"
    if result.get("ui_pid"):
        ui = f"{result['ui']}/runs, until: kill {result['ui_pid']}"
    copies, turns = result["duplicates"], result.get("turns") or {}
    rows = {
        "rows read": f"{result['rows']:,}",
        "kept": f"{result['kept']:,}",
        "rejected": f"{result['rejected']:,}" + (f", and {plural(copies, 'duplicate')}" if copies else ""),
        "answers now": f"{result['completed']:,}",
        "answers in all": f"{result['done']:,} of {result['kept']:,} kept; {result['failed']:,} failed",
        "output tokens": f"{result['output_tokens']:,}, {result['tok_s']:,.0f} tok/s",
        **_turn_rows(result.get("token_rows", 0), turns),
        "published": f"{result['store']}, read back into {result['manifest']}",
        "run folder": result["run_dir"],
        "report": result.get("report", "none: nothing was new"),
        "Prefect UI": ui,
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _turn_rows(token_rows: int, turns: Mapping[str, int]) -> dict[str, str]:
    """What was published, counted in turns: each answered turn of a conversation is a token row of its own."""
    if not turns.get("turns"):
        return {}
    answered = f"{plural(turns['turns'], 'answered turn')} of {plural(turns['conversations'], 'conversation')}"
    return {"token rows": f"{token_rows:,}, one a turn: {answered}", "cut at the output limit": cut_text(turns)}
