"""Which run is meant: a run folder, a data set, or a folder with data sets in it."""

from pathlib import Path

from tasks.errors import SpecError
from tasks.runs import RunPaths

PLACES = ("spec.json", "runs/*/spec.json", "*/runs/*/spec.json", "*/*/runs/*/spec.json")
TRACES = ("progress.jsonl", "record.json", "spec.json")


def find_run(where: Path) -> RunPaths:
    """The run at `where`, or the one below it that was worked on last. Raises SpecError when there is none."""
    found = [
        path.parent.resolve() for place in PLACES for path in where.glob(place) if path.parent.parent.name == "runs"
    ]
    # A published copy has a spec.json too; only the working folder has the record.
    found = [run for run in found if any((run / name).exists() for name in TRACES[:2])] or found
    if not found and (where / "spec.json").exists():
        found = [where.resolve()]
    if not found:
        raise SpecError(f"no run at or below {where}: give a run folder (…/runs/<run id>), a data set or a work folder")
    newest = max(found, key=worked_on_s)
    return RunPaths(newest.parent.parent, newest.name)


def worked_on_s(run: Path) -> float:
    """Unix time of the last trace of work."""
    return max((run / name).stat().st_mtime for name in TRACES if (run / name).exists())
