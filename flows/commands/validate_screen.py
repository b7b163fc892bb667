"""What `regen validate` prints for people: the verdict first, then why."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from tasks.records import ValidationResult
from tasks.validation.examples import examples
from tasks.validation.plots import bin_names
from tasks.validation.reasons import EXPLANATIONS
from tasks.validation.settings import SourceSettings

BAR = 40
"""Characters of the longest bar."""


@contextmanager
def judging() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal's stderr; call it with (bytes judged, bytes in all)."""
    screen = Console(stderr=True)
    columns = (TextColumn("judging"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        job = bar.add_task("judging", total=None)
        yield lambda judged, total: bar.update(job, completed=judged, total=total)


def show(result: ValidationResult, settings: SourceSettings, console: Console | None = None) -> None:
    """Verdict, sums, histogram, reasons and examples, on stderr so that stdout stays one line of JSON."""
    screen = console or Console(stderr=True, highlight=False)
    passed = not any(not check.passed for check in result.report.expectations)
    colour, mark = ("green", "✔") if passed else ("red", "✘")
    body: list[Text | Table] = [Text(result.report.summary, style="bold"), _sums(result)]
    tokens = result.report.details.get("tokens")
    if tokens and "text" in tokens.get("example", {}):
        body.append(Text(f"a typical target of such a sample: {tokens['example']['text']!r}", style="yellow"))
    if not passed and settings.gate == "monitor":
        body.append(Text("gate is monitor: reported, not enforced", style="dim"))
    screen.print(Panel(Group(*body), title=f"{mark} {result.report.verdict}", border_style=colour))
    if tokens:
        screen.print(_histogram(tokens["histogram"]))
    if result.reasons or result.duplicates or result.regenerate_reasons:
        screen.print(_reasons(result))
    found = examples(Path(result.rejected_path), each=2)
    if found:
        screen.print(_examples(found))
    for step in result.report.next_steps:
        screen.print(Text(f"→ {step}"))


def _sums(result: ValidationResult) -> Text:
    parts = (("kept", result.kept), ("rejected", result.rejected), ("duplicates", result.duplicates))
    shown = " + ".join(f"{count:,} {name}" for name, count in parts)
    return Text(f"{result.rows:,} rows = {shown}")


def _histogram(histogram: list[list[int]]) -> Table:
    table = Table(
        box=None, title="supervised tokens a sample (red: below the floor)", title_justify="left", padding=(0, 1)
    )
    table.add_column("tokens", justify="right")
    table.add_column("")
    table.add_column("samples", justify="right")
    table.add_column("", justify="right")
    names = bin_names([edge for edge, _, _ in histogram])
    total, most = max(sum(n for _, n, _ in histogram), 1), max(max(n for _, n, _ in histogram), 1)
    used = [i for i, (_, n, _) in enumerate(histogram) if n]
    for i in range(used[0], used[-1] + 1) if used else ():
        _, count, below = histogram[i]
        red, width = round(BAR * below / most), max(round(BAR * count / most), 1 if count else 0)
        bar = Text("█" * red, style="red").append("█" * (width - red), style="green")
        table.add_row(names[i], bar, f"{count:,}", f"{count / total:.1%}")
    return table


def _reasons(result: ValidationResult) -> Table:
    table = Table(title="reasons", title_justify="left", box=None, padding=(0, 1))
    for column, side in (("", "left"), ("reason", "left"), ("rows", "right"), ("share", "right"), ("meaning", "left")):
        table.add_column(column, justify="right" if side == "right" else "left")
    groups = (
        ("rejected", result.reasons),
        ("duplicate", result.report.details["duplicate_reasons"]),
        ("kept, answer bad", result.regenerate_reasons),
    )
    for outcome, reasons in groups:
        for code, count in sorted(reasons.items(), key=lambda item: -item[1]):
            share = f"{count / max(result.rows, 1):.1%}"
            table.add_row(outcome, code, f"{count:,}", share, EXPLANATIONS[code])
    return table


def _examples(found: list[dict[str, object]]) -> Table:
    table = Table(title="examples", title_justify="left", box=None, padding=(0, 1))
    for column in ("reason", "where (row from 0)", "id", "detail"):
        table.add_column(column, overflow="fold")
    for row in found:
        twin = f" (of {row['duplicate_of']})" if row["duplicate_of"] else ""
        where = f"{Path(str(row['source'])).name}:{row['row']}"
        table.add_row(str(row["reason"]), where, str(row["id"] or ""), Text(f"{row['detail'] or ''}{twin}"))
    return table
