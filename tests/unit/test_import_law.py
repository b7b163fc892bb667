"""The rooms stay apart: each imports the shared modules and itself, never another room."""

import ast
from pathlib import Path

import pytest

from paths import REPOSITORY

ROOMS = ("validation", "provisioning", "power", "calibration", "generation", "tokenization", "upload", "report")
FILES = sorted((REPOSITORY / "tasks").rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_a_module_keeps_to_its_room(path: Path) -> None:
    room = path.relative_to(REPOSITORY / "tasks").parts[0]
    for name in imported(path):
        assert not name.startswith("flows"), f"{path} imports {name}: data flows one way"
        if name.startswith("tasks."):
            other = name.split(".")[1]
            assert other == room or other not in ROOMS, f"{path} reaches into the room {other}"
        if name.split(".")[0] == "prefect":
            assert path.name == "task.py", f"{path} imports prefect"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_modules_stay_small(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= (80 if path.name == "task.py" and path.parent.name != "ui" else 400)


def test_no_module_shadows_a_package() -> None:
    assert not (REPOSITORY / "docker" / "__init__.py").exists()
    stems = {p.stem for p in (REPOSITORY / "flows").glob("*.py")}
    assert not stems & {"datasets", "openai", "tokenize", "docker", "prefect", "boto3", "polars"}
