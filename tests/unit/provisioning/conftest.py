"""Helpers of this folder are importable, and every test has a node folder of its own."""

import sys
from pathlib import Path

import pytest

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def node_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """State files and GPU locks of the test, not of the machine."""
    folder = tmp_path / "node"
    monkeypatch.setenv("REGEN_STATE_DIR", str(folder))
    return folder


from provisioning_fleets import bench  # noqa: E402, F401 - the fixture of the fleet tests
