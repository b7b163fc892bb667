"""A fleet of fake SGLang servers, and what the fleet tests share."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioning_helpers import fake_gpu, write_interpreter, write_model
from tasks.provisioning.fleet import Fleet, open_fleet
from tasks.provisioning.settings import MtpSettings, ServingSettings
from tasks.records import GpuFacts
from tasks.runs import RunPaths
from tasks.settings import TargetSettings

SERVE = {"serve": True}
LOADED = (
    "Load weight begin. avail mem=139.13 GB\n"
    "Load weight end. elapsed=0.3 s, type=Qwen3_5ForConditionalGeneration, avail mem=88.07 GB, mem usage=51.05 GB.\n"
)
RESERVE = (
    f"Spec v2 is enabled by default\n{LOADED}"
    "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
)
OOM = f"{LOADED}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


class Listener:
    """Keeps what the supervisor tells the engine."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def server_down(self, name: str, reason: str) -> None:
        self.told.append(("down", f"{name}: {reason}"))

    def server_up(self, name: str) -> None:
        self.told.append(("up", name))


class Bench:
    """Opens fleets with the stand-in; closes them after the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = RunPaths(folder / "data", "r1")
        self.model = write_model(folder / "model")
        self.said: list[str] = []
        self.fleets: list[Fleet] = []

    def open(
        self,
        *behaviours: dict[str, Any],
        gpus: list[GpuFacts] | None = None,
        mtp: bool = True,
        simulate: float | None = None,
        indices: tuple[int, ...] = (),
        knobs: MtpSettings | None = None,
        **serving: Any,
    ) -> Fleet:
        python = write_interpreter(self.folder / "env", list(behaviours) or [SERVE])
        options = {
            "python": str(python),
            "gpus": indices,
            "mtp": knobs or MtpSettings(),
            "hang_timeout_s": 3.0,
            "start_timeout_s": 30.0,
            **serving,
        }
        fleet = open_fleet(
            ServingSettings(**options),
            TargetSettings(model=str(self.model), mtp=mtp),
            self.paths,
            max_tokens=4096,
            progress=self.said.append,
            gpus=gpus or [fake_gpu()],
            simulate_accept_length=simulate,
        )
        self.fleets.append(fleet)
        return fleet

    def starts(self) -> list[dict[str, Any]]:
        text = (self.folder / "env" / "starts").read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last may be half-written


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    # The real pauses are for servers that take minutes.
    monkeypatch.setattr("tasks.provisioning.start.POLL_S", 0.1)
    monkeypatch.setattr("tasks.provisioning.keeper.WATCH_S", 0.2)
    monkeypatch.setattr("tasks.provisioning.keeper.SAMPLE_S", 0.3)
    monkeypatch.setattr("tasks.provisioning.keeper.backoff_s", lambda restarts: 0.3)
    made = Bench(tmp_path)
    yield made
    for fleet in made.fleets:
        fleet.close()


def until(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def flag(start: dict[str, Any], name: str) -> str:
    flags = start["flags"]
    return str(flags[flags.index(name) + 1])
