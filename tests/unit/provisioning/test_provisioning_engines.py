"""Where SGLang's interpreter comes from, and which GPUs there are."""

import stat
from pathlib import Path

import pytest

from provisioning_helpers import fake_gpu, write_interpreter
from tasks.errors import ServerError
from tasks.provisioning.engines import sglang_python
from tasks.provisioning.gpus import choose, groups, least_free, parse_nvidia_smi, read_nvidia_smi
from tasks.provisioning.settings import ServingSettings

UV = """#!/bin/sh
echo "$@" >> "{log}"
if [ "$1" = venv ]; then for last in "$@"; do :; done; mkdir -p "$last/bin"; cp "{python}" "$last/bin/python"; fi
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_named_interpreter_tells_its_version(tmp_path: Path) -> None:
    python = write_interpreter(tmp_path, [], version="0.5.15")
    assert sglang_python(ServingSettings(python=str(python)), print) == (str(python), "0.5.15")


def test_an_interpreter_without_sglang_says_what_to_install(tmp_path: Path) -> None:
    python = executable(tmp_path / "python", "#!/bin/sh\necho 'PackageNotFoundError: sglang' >&2; exit 1\n")
    with pytest.raises(ServerError, match=r"has no sglang.*requirements-sglang.txt"):
        sglang_python(ServingSettings(python=str(python)), print)
    with pytest.raises(ServerError, match="cannot be run"):
        sglang_python(ServingSettings(python="/no/such/python"), print)


def test_uv_makes_an_environment_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = write_interpreter(tmp_path / "source", [])
    log = tmp_path / "uv.log"
    executable(tmp_path / "bin" / "uv", UV.format(log=log, python=python))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    said: list[str] = []
    made, version = sglang_python(ServingSettings(), said.append)
    assert version == "0.5.17" and made.startswith(
        str(tmp_path / "home" / ".cache" / "drafter-regen" / "sglang-0.5.17")
    )
    assert "sglang==0.5.17" in log.read_text() and said
    lines = len(log.read_text().splitlines())
    assert sglang_python(ServingSettings(), said.append)[0] == made
    assert len(log.read_text().splitlines()) == lines


def test_without_uv_it_is_said_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ServerError, match=r"no `uv`.*serving.python"):
        sglang_python(ServingSettings(), print)


def test_nvidia_smi_rows() -> None:
    text = "0, GPU-aa, 143771, 142469, NVIDIA H200\n1, GPU-bb, 143771, 99, NVIDIA H200\n2, GPU-cc, [N/A], [N/A], GB10\n"
    facts = parse_nvidia_smi(text)
    assert [(gpu.index, gpu.uuid, gpu.name) for gpu in facts] == [
        (0, "GPU-aa", "NVIDIA H200"),
        (1, "GPU-bb", "NVIDIA H200"),
    ]
    assert facts[0].free_bytes == 142_469 << 20
    assert least_free(facts) == 99 << 20


def test_no_nvidia_smi_means_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_nvidia_smi() == []
    with pytest.raises(ServerError, match="attach"):
        choose([], ())


def test_groups_leave_a_remainder_unused() -> None:
    gpus = [fake_gpu(i) for i in range(5)]
    assert [[gpu.index for gpu in group] for group in groups(gpus, 2)] == [[0, 1], [2, 3]]
