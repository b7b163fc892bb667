"""An environment of their own for the published trainers: their pins clash with ours."""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PINS = ["specforge==0.2.0", "speculators==0.9.0", "hs-connectors==0.9.0", "yunchang", "openai-harmony", "accelerate"]
"""Installed without their dependencies, which would bring CUDA builds and a server."""
NEEDED = ["torch==2.13.0", "transformers==5.19.0", "datasets==5.1.0", "httpx", "aiohttp", "loguru", "openai>=2"]
NEEDED += ["protobuf", "psutil", "pydantic", "pydantic-settings", "rich", "safetensors", "tqdm", "typer", "requests"]
"""What their loading code imports."""
MARK = "installed"


@pytest.fixture(scope="session")
def trainers_python() -> Path:
    """A Python with the published trainers; built once and kept. Skips, and says why, where it cannot be built."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "drafter-regen" / "trainers"
    folder = Path(os.environ.get("REGEN_TEST_TRAINERS", default))
    python = folder / "bin" / "python"
    if (folder / MARK).exists():
        return python
    try:
        venv.create(folder, with_pip=True, clear=True)
        for packages in (NEEDED, ["--no-deps", *PINS]):
            command = [str(python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *packages]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"the published trainers cannot be installed here: {str(said).strip().splitlines()[-1][:300]}")
    (folder / MARK).write_text(sys.version)
    return python


@pytest.fixture
def load(trainers_python: Path) -> Callable[..., Any]:
    """Call a function of trainer_loaders.py with the trainers' Python; returns its JSON."""

    def call(name: str, *arguments: object) -> Any:
        script = Path(__file__).with_name("trainer_loaders.py")
        command = [str(trainers_python), str(script), name, *map(str, arguments)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return call
