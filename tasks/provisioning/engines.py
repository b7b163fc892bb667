"""The command line of one server for each mode: SGLang in a Python environment, SGLang in its image, the CPU engine."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tasks.errors import ServerError
from tasks.provisioning.launcher import CommandLine
from tasks.provisioning.settings import ServingSettings

SIMULATION_PREFIX = "SGLANG_SIMULATE_ACC"
DOCKER_PORT = 30_000
REQUIREMENTS = "docker/requirements-sglang.txt"


def refuse_simulation(environments: Sequence[Mapping[str, str]], allowed: float | None) -> None:
    """SGLANG_SIMULATE_ACC_LEN makes the server answer with meaningless tokens at a made-up acceptance length.

    Raises ServerError when it is set anywhere; only a GPU test may ask for it, by argument, and what it makes is
    labelled.
    """
    if allowed is not None:
        return
    found = sorted({name for env in environments for name in env if name.startswith(SIMULATION_PREFIX)})
    if found:
        raise ServerError(
            f"{', '.join(found)} is set: with it SGLang overwrites what the model says: the data would be garbage. "
            "Unset it"
        )


def process_command(
    python: str, arguments: Sequence[str], env: Mapping[str, str], gpus: Sequence[str], api_key: str
) -> CommandLine:
    """`python -m sglang.launch_server` bound to its GPUs by UUID."""
    bound = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return CommandLine(
        command=(python, "-m", "sglang.launch_server", *arguments),
        env={"PYTHONUNBUFFERED": "1", **bound, **env},
        secrets=(api_key,) if api_key else (),
    )


def docker_command(
    image: str,
    container: str,
    port: int,
    arguments: Sequence[str],
    env: Mapping[str, str],
    gpus: Sequence[str],
    api_key: str,
    mounts: Sequence[str] = (),
    docker: str = "docker",
) -> CommandLine:
    """`docker run` in the foreground, so that its log is the server's. The port is published on loopback only; the
    container is removed with the run by `docker rm -f`, since a signal to the client does not reach it when it is
    killed."""
    device = "device=" + ",".join(gpus) if gpus else "all"
    command = [docker, "run", "--rm", "--name", container, "--label", "drafter-regen=1", "--init"]
    command += ["--gpus", f'"{device}"' if "," in device else device, "--ipc", "host"]
    command += ["--publish", f"127.0.0.1:{port}:{DOCKER_PORT}"]
    for name, value in sorted(env.items()):
        command += ["--env", f"{name}={value}"]
    for mount in mounts:
        command += ["--volume", mount]
    command += [image, "python3", "-m", "sglang.launch_server", *arguments]
    return CommandLine(
        command=tuple(command),
        secrets=(api_key,) if api_key else (),
        stop_command=(docker, "rm", "-f", container),
    )


def default_image(version: str) -> str:
    """The published image of a release."""
    return f"lmsysorg/sglang:v{version}"


def sglang_python(serving: ServingSettings, say: Callable[[str], None]) -> tuple[str, str]:
    """(interpreter, installed SGLang version). Makes an environment with `uv` where none is named.

    Its exact pins of torch, transformers and openai must not enter this project's environment, so it is always
    another one. Raises ServerError saying what to install.
    """
    if serving.python:
        python = shutil.which(serving.python) or serving.python
        return python, _installed(python)
    folder = Path.home() / ".cache" / "drafter-regen" / f"sglang-{serving.sglang_version}"
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        _make(folder, serving.sglang_version, say)
    return python, _installed(python)


def _installed(python: str) -> str:
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"serving.python {python} cannot be run: {error}") from error
    if done.returncode != 0:
        raise ServerError(
            f"{python} has no sglang ({done.stderr.strip().splitlines()[-1:] or 'no output'}): "
            f"install it there with `pip install -r {REQUIREMENTS}`, or name another interpreter in serving.python"
        )
    return done.stdout.strip()


def _make(folder: Path, version: str, say: Callable[[str], None]) -> None:
    uv = shutil.which("uv")
    if uv is None:
        raise ServerError(
            "serving.python is empty and there is no `uv` to make an environment with: install uv, or make a virtual "
            f"environment, `pip install -r {REQUIREMENTS}` in it, and name its interpreter in serving.python"
        )
    say(f"making an environment for sglang {version} in {folder} (several GB)")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    release = f"{sys.version_info.major}.{max(12, sys.version_info.minor)}"
    for command in (
        [uv, "venv", "--relocatable", "--python", release, str(partial)],
        [uv, "pip", "install", "--python", str(partial / "bin" / "python"), f"sglang=={version}"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServerError(f"{' '.join(command[:3])} failed: {done.stderr.strip()[-600:]}")
    partial.rename(folder)
