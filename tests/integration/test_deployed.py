"""From a clone, as the README prints it: a server, all deployments, a worker, and a run of regen/demo through them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from paths import REPOSITORY

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Site:
    """A folder as a user's clone would be: job files beside pyproject.toml, its own Prefect home."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.api = f"http://127.0.0.1:{self.port}/api"
        shutil.copytree(REPOSITORY / "deployments", folder / "deployments")
        shutil.copy(REPOSITORY / "pyproject.toml", folder / "pyproject.toml")
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")},
            "PREFECT_HOME": str(folder / "prefect-home"),
            "PREFECT_API_URL": self.api,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=self.folder,
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *command: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def wait_healthy(self, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.api}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError((self.folder / "server.log").read_text()[-3000:])

    def post(self, path: str, body: object) -> object:
        request = urllib.request.Request(
            f"{self.api}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("clone"))
    running = [site.start("server", "prefect", "server", "start", "--port", str(site.port))]
    try:
        site.wait_healthy()
        made = site.run("prefect", "work-pool", "create", "gpu", "--type", "process", "--overwrite")
        assert made.returncode == 0, made.stderr
        deployed = site.run("prefect", "--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        running.append(site.start("worker", "prefect", "worker", "start", "--pool", "gpu", "--type", "process"))
        yield site
    finally:
        for process in reversed(running):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_every_deployment_is_registered_with_its_form(site: Site) -> None:
    found = site.post("/deployments/filter", {})
    assert isinstance(found, list)
    by_flow = {(d["entrypoint"].split(".")[1], d["name"]): d for d in found}
    assert set(by_flow) == {("regen", "qwen36"), ("regen", "demo"), ("validate", "qwen36"), ("calibrate", "qwen36")}
    qwen = by_flow["regen", "qwen36"]
    assert qwen["parameters"]["sampling"]["max_tokens"] == 32768
    assert qwen["concurrency_options"]["collision_strategy"] == "ENQUEUE"
    form = qwen["parameter_openapi_schema"]["definitions"]["TargetSettings"]["properties"]["model"]
    assert form["title"] and form["description"]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_demo_runs_through_a_worker_and_publishes(site: Site) -> None:
    source = {"paths": ["demo:prompts"], "gate": "monitor", "limit": 10}
    ran = site.run(
        "prefect",
        "deployment",
        "run",
        "regen/demo",
        "--param",
        f"source={json.dumps(source)}",
        "--watch",
        timeout_s=400,
    )
    log = (site.folder / "worker.log").read_text()
    assert ran.returncode == 0, ran.stdout[-2000:] + log[-6000:]
    dataset = site.folder / "out" / "regen-demo" / "demo"
    manifest = json.loads((dataset / "manifest.json").read_text())
    assert manifest["snapshots"]
    tokens = sorted(dataset.glob("**/tokens.parquet"))
    rows = pl.scan_parquet(tokens).collect()
    assert rows.height > 0 and (rows["loss_mask"].list.sum() == rows["n_supervised"]).all()
    artifacts = site.post("/artifacts/latest/filter", {"limit": 100})
    assert isinstance(artifacts, list)
    keys = {a["key"] for a in artifacts}
    assert {"progress", "validation-reasons", "calibration", "report"} <= keys, keys


@pytest.mark.slow
def test_the_zombie_automation_is_registered_once(site: Site) -> None:
    for done in ("created", "updated"):
        ran = site.run("python", str(REPOSITORY / "deployments" / "automations.py"))
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout.splitlines()[-1])["done"] == done
