"""Which run is meant: a run folder, a data set, or a folder with data sets in it."""

from dataclasses import dataclass
from pathlib import Path

from tasks.errors import SpecError
from tasks.report.read import load
from tasks.runs import RunPaths

PLACES = ("spec.json", "runs/*/spec.json", "*/runs/*/spec.json", "*/*/runs/*/spec.json")
TRACES = ("progress.jsonl", "record.json", "spec.json")


@dataclass(frozen=True, slots=True)
class Found:
    """A run, and the runs worked on later that found nothing to do."""

    paths: RunPaths
    idle: tuple[str, ...] = ()

    @property
    def note(self) -> str | None:
        """What to tell about the idle runs."""
        if not self.idle:
            return None
        more = f" (and {len(self.idle) - 1} before it)" if len(self.idle) > 1 else ""
        return f"newer run {self.idle[0]} had nothing to do{more}"


def find_run(where: Path) -> Found:
    """The run at `where`, or of those below it the one worked on last that had prompts or answers.

    Where every run was idle it is the last of them. Raises SpecError when there is none.
    """
    found = [
        path.parent.resolve() for place in PLACES for path in where.glob(place) if path.parent.parent.name == "runs"
    ]
    # A published copy has a spec.json too; only the working folder has the record.
    found = [run for run in found if any((run / name).exists() for name in TRACES[:2])] or found
    if not found and (where / "spec.json").exists():
        found = [where.resolve()]
    if not found:
        raise SpecError(f"no run at or below {where}: give a run folder (…/runs/<run id>), a data set or a work folder")
    newest = sorted(found, key=worked_on_s, reverse=True)
    at = next((index for index, run in enumerate(newest) if not is_idle(run)), 0)
    idle = tuple(run.name for run in newest[:at] if run.parent == newest[at].parent)
    return Found(RunPaths(newest[at].parent.parent, newest[at].name), idle)


def is_idle(run: Path) -> bool:
    """Whether every prompt of the run was answered by earlier ones, so that it made nothing."""
    prompts = load(run / "record.json").get("prompts")
    pending = prompts.get("pending") if isinstance(prompts, dict) else None
    return pending == 0 and not any(run.glob("chunks/*/*"))


def worked_on_s(run: Path) -> float:
    """Unix time of the last trace of work."""
    return max((run / name).stat().st_mtime for name in TRACES if (run / name).exists())
