"""What an install exposes and what the lock files hold."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paths import REPOSITORY

LOCKS = ("requirements.lock", "requirements-dev.lock")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_flows_and_tasks_with_their_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name and ".data/" not in name} == {
        "flows",
        "tasks",
    }
    assert "flows/demo_prompts.jsonl" in names
    assert any(name.endswith(".data/data/share/drafter-regen/demo.yaml") for name in names)


def test_the_console_command_starts_from_anywhere(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(Path(sys.executable).parent / "regen"), "--help"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "regen demo --limit 8" in ran.stdout


@pytest.mark.parametrize("name", ["tests", "deployments", "docs"])
def test_an_editable_install_exposes_nothing_else_of_the_repository(name: str, tmp_path: Path) -> None:
    code = "import sys, importlib.util as u; s = u.find_spec(sys.argv[1]); print(s and [*s.submodule_search_locations])"
    ran = subprocess.run(
        [sys.executable, "-I", "-c", code, name], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert str(REPOSITORY) not in ran.stdout


def test_flows_and_tasks_are_those_of_this_repository(tmp_path: Path) -> None:
    code = "import flows, tasks; print(flows.__file__, tasks.__file__)"
    ran = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(Path(path).is_relative_to(REPOSITORY) for path in ran.stdout.split()), ran.stdout


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_hashes_no_registry_host_and_installs_neither_torch_nor_sglang(lock: str) -> None:
    text = (REPOSITORY / lock).read_text()
    assert "http" not in re.sub(r"(?m)^\s*#.*$|^[a-z0-9-]*http[a-z0-9-]*==.*$", "", text)
    for line in re.findall(r"(?m)^[a-z0-9][^\n]*==[^\n]*$", text):
        assert line.endswith("\\"), f"{line} has no hash"
        name = line.split("==")[0]
        if name in ("torch", "sglang", "llama-cpp-python", "accelerate") or name.startswith("nvidia-cu"):
            assert "sys_platform == 'never'" in line, line


def test_the_user_lock_is_part_of_the_developers_lock() -> None:
    pins = [set(re.findall(r"(?m)^([a-z0-9][^\s;]*==[^\s;]+)", (REPOSITORY / lock).read_text())) for lock in LOCKS]
    assert pins[0] <= pins[1]
