"""Docker mode with a stand-in for the docker program."""

import json
import stat
import sys
from pathlib import Path

import pytest

from provisioning_helpers import fake_gpu, write_model
from tasks.provisioning.engines import default_image, docker_command
from tasks.provisioning.fleet import open_fleet
from tasks.provisioning.reaper import find_leftovers, state_path
from tasks.provisioning.settings import ServingSettings
from tasks.provisioning.supervisor import write_state
from tasks.runs import RunPaths
from tasks.settings import TargetSettings

DOCKER = '''#!{python}
"""`docker run … image python3 -m sglang.launch_server ARGS` serves; `docker rm -f NAME` is only noted."""
import json, os, sys
sys.path.insert(0, {helpers!r})
words = sys.argv[1:]
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(words) + "\\n")
if words[0] == "run":
    from fake_sglang import serve
    port = words[words.index("--publish") + 1].split(":")[1]
    flags = words[words.index("sglang.launch_server") + 1:]
    flags[flags.index("--port") + 1] = port
    flags[flags.index("--host") + 1] = "127.0.0.1"
    serve({{"serve": True}}, flags)
'''


@pytest.fixture
def docker_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    calls = tmp_path / "calls"
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    helpers = str(Path(__file__).parent)
    program.write_text(DOCKER.format(python=sys.executable, helpers=helpers, calls=str(calls)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return calls


def test_a_container_serves_and_is_removed_with_the_fleet(tmp_path: Path, docker_calls: Path) -> None:
    model = write_model(tmp_path / "model")
    serving = ServingSettings(mode="docker", env={"HF_HUB_OFFLINE": "1"})
    target = TargetSettings(model=str(model))
    with open_fleet(serving, target, RunPaths(tmp_path, "r1"), max_tokens=64, gpus=[fake_gpu()]) as fleet:
        assert fleet.servers[0].engine == "sglang"
        key = fleet.servers[0].api_key
        assert key not in json.dumps(fleet.records)
    run, removed = (json.loads(line) for line in docker_calls.read_text().splitlines())
    text = " ".join(run)
    assert "--name regen-r1-server-0" in text and "lmsysorg/sglang:v0.5.17" in text
    assert f"--gpus device={fake_gpu().uuid}" in text
    assert f"--volume {model}:{model}:ro" in text
    assert "--publish 127.0.0.1:" in text and "--host 0.0.0.0 --port 30000" in text
    assert "--env HF_HUB_OFFLINE=1" in text and "--ipc host" in text and "--rm" in run
    assert removed == ["rm", "-f", "regen-r1-server-0"]


def test_the_container_of_a_dead_run_is_removed(docker_calls: Path) -> None:
    state = {"name": "server-0", "run_id": "old", "pid": 2**22 - 1, "pgid": 2**22 - 1, "start_ticks": 1}
    dead = {
        "supervisor_pid": 2**22 - 1,
        "supervisor_ticks": 1,
        "stop_command": ["docker", "rm", "-f", "regen-old-server-0"],
    }
    write_state(state_path("old", "server-0"), {**state, **dead})
    assert [one.ended for one in find_leftovers()] == [True]
    assert json.loads(docker_calls.read_text()) == ["rm", "-f", "regen-old-server-0"]


def test_several_gpus_are_quoted_as_docker_wants_them() -> None:
    line = docker_command("image", "name", 1, ["--x"], {}, ["GPU-a", "GPU-b"], "key")
    assert '"device=GPU-a,GPU-b"' in line.command
    assert line.secrets == ("key",) and line.stop_command == ("docker", "rm", "-f", "name")
    assert default_image("0.5.17") == "lmsysorg/sglang:v0.5.17"
