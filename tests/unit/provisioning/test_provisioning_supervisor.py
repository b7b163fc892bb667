"""Servers never outlive their flow: end, SIGTERM, SIGKILL. And secrets stay out of logs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.provisioning.launcher import CommandLine, Launch, Running, redact, server_environment, start
from tasks.provisioning.reaper import end_run, find_leftovers, lock_gpus, state_path
from tasks.provisioning.supervisor import LogWriter, start_ticks

FAMILY = """
import os, subprocess, sys, time
detached = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid} {detached.pid}")
print("the key is s3cret", flush=True)
time.sleep(600)
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def until(condition: Callable[[], object], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def gone(pids: list[int]) -> bool:
    return all(start_ticks(pid) is None for pid in pids)


def family(path: Path) -> list[int]:
    assert until(lambda: path.exists() and len(path.read_text().split()) == 3)
    return [int(word) for word in path.read_text().split()]


def launch(folder: Path, code: str, *arguments: str, grace_s: float = 8.0) -> Running:
    command = CommandLine((sys.executable, "-c", code, *arguments), secrets=("s3cret",))
    return start(Launch("s0", command, 1, folder / "s0.log", state_path("r1", "s0"), "r1", grace_s=grace_s))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = launch(tmp_path, FAMILY, str(tmp_path / "pids"))
    yield made
    made.stop()


def test_stop_ends_the_group_and_what_left_it(running: Running, tmp_path: Path) -> None:
    pids = family(tmp_path / "pids")
    assert state_path("r1", "s0").exists()
    ended = running.stop()
    assert ended is not None and ended.why == "asked"
    assert gone(pids)
    assert not state_path("r1", "s0").exists()


def test_secrets_are_blanked_in_the_log_and_nowhere_else_on_disk(running: Running, tmp_path: Path) -> None:
    family(tmp_path / "pids")
    assert until(lambda: "***" in (tmp_path / "s0.log").read_text())
    running.stop()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    made = launch(tmp_path, STUBBORN, grace_s=0.5)
    assert until(lambda: "up" in (tmp_path / "s0.log").read_text())
    ended = made.stop()
    assert ended is not None and ended.code == -signal.SIGKILL
    assert made.pid is not None and gone([made.pid])


def test_an_end_of_its_own_is_seen(tmp_path: Path) -> None:
    made = launch(tmp_path, "print('bye'); raise SystemExit(3)")
    assert until(lambda: made.poll() is not None)
    ended = made.poll()
    assert ended is not None and (ended.code, ended.why) == (3, "exited")


def test_a_command_that_does_not_exist_is_an_end_not_an_exception(tmp_path: Path) -> None:
    command = CommandLine((str(tmp_path / "nothing"),))
    made = start(Launch("s0", command, 1, tmp_path / "s0.log", state_path("r1", "s0")))
    assert until(lambda: made.poll() is not None)
    ended = made.poll()
    assert ended is not None and ended.code == 127 and "No such file" in ended.why


FLOW = """
import sys, time
from pathlib import Path
from tasks.provisioning.launcher import CommandLine, Launch, start
from tasks.provisioning.reaper import lock_gpus, state_path
folder, code = Path(sys.argv[1]), sys.argv[2]
locks = lock_gpus(["GPU-1"], "r1")
start(Launch("s0", CommandLine((sys.executable, "-c", code, str(folder / "pids"))), 1, folder / "s0.log",
             state_path("r1", "s0"), "r1", lock_fds=locks.fds))
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_flow_that_is_killed_leaves_no_server(tmp_path: Path, number: signal.Signals) -> None:
    flow = subprocess.Popen([sys.executable, "-c", FLOW, str(tmp_path), FAMILY], stdout=subprocess.PIPE)
    assert flow.stdout is not None and flow.stdout.readline() == b"started\n"
    pids = family(tmp_path / "pids")
    flow.send_signal(number)
    flow.wait(10)
    assert until(lambda: gone(pids)), "a process outlived its flow"
    # The lock outlives the flow exactly until the server is gone.
    lock_gpus(["GPU-1"], "r2", wait_s=10).release()
    assert flow.stdout.read() == b""
    flow.stdout.close()


def test_a_flow_killed_with_its_group_leaves_no_server(tmp_path: Path) -> None:
    """Prefect cancels with killpg: the supervisor is in a session of its own and sees the closed pipe."""
    command = [sys.executable, "-c", FLOW, str(tmp_path), FAMILY]
    flow = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert flow.stdout is not None and flow.stdout.readline() == b"started\n"
    pids = family(tmp_path / "pids")
    os.killpg(flow.pid, signal.SIGKILL)
    flow.wait(10)
    flow.stdout.close()
    assert until(lambda: gone(pids))


def test_a_supervisor_that_is_killed_takes_the_server_along_and_the_rest_is_reaped(tmp_path: Path) -> None:
    made = launch(tmp_path, FAMILY, str(tmp_path / "pids"))
    server, child, detached = family(tmp_path / "pids")
    os.kill(made.supervisor_pid, signal.SIGKILL)
    assert until(lambda: gone([server]))
    assert until(lambda: made.poll() is not None)
    assert not gone([child])
    assert [(one.name, one.ended) for one in find_leftovers()] == [("s0", True)]
    assert until(lambda: gone([child]))
    os.kill(detached, signal.SIGKILL)  # in a session of its own: no trace leads to it once its supervisor is dead


def test_leftovers_of_a_dead_run_are_found_reported_and_ended(tmp_path: Path) -> None:
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    ticks = start_ticks(orphan.pid)
    from tasks.provisioning.supervisor import write_state

    state = {"name": "server-0", "run_id": "old", "pid": orphan.pid, "pgid": orphan.pid, "start_ticks": ticks}
    dead = {"supervisor_pid": 2**22 - 1, "supervisor_ticks": 1, "port": 30_000, "started_at": time.time() - 120}
    write_state(state_path("old", "server-0"), {**state, **dead})
    seen = find_leftovers(end=False)
    assert [(one.run_id, one.pid, one.ended) for one in seen] == [("old", orphan.pid, False)]
    ended = find_leftovers()
    assert ended[0].ended and "server-0 of run old" in str(ended[0])
    assert orphan.wait(10) == -signal.SIGKILL
    assert find_leftovers() == []


def test_a_number_that_another_process_got_is_not_killed() -> None:
    from tasks.provisioning.supervisor import write_state

    mine = {
        "pid": os.getpid(),
        "pgid": os.getpid(),
        "start_ticks": 1,
        "supervisor_pid": 2**22 - 1,
        "supervisor_ticks": 1,
    }
    write_state(state_path("old", "s"), mine)
    assert find_leftovers() == []


def test_servers_of_a_living_run_are_reported_but_left_alone(running: Running, tmp_path: Path) -> None:
    pids = family(tmp_path / "pids")
    seen = find_leftovers()
    assert [(one.supervised, one.ended) for one in seen] == [(True, False)]
    assert not gone(pids)


def test_end_run_ends_a_supervised_server_too(running: Running, tmp_path: Path) -> None:
    pids = family(tmp_path / "pids")
    end_run("r1")
    assert until(lambda: gone(pids))
    end_run("another")


def test_two_runs_do_not_share_a_gpu() -> None:
    from tasks.errors import ServerError

    first = lock_gpus(["GPU-1", "GPU-2"], "r1")
    with pytest.raises(ServerError, match=r"GPU-2 is in use by .*r1"):
        lock_gpus(["GPU-2"], "r2", wait_s=0.1)
    first.release()
    lock_gpus(["GPU-2"], "r2", wait_s=0.1).release()


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_secret_on_the_border_of_two_writes_is_blanked(tmp_path: Path, cut: int) -> None:
    text = b"before s3cret-key after s3cret-key\n"
    log = LogWriter(tmp_path / f"{cut}.log", ["s3cret-key"])
    log.write(text[:cut])
    log.write(text[cut:])
    log.close()
    assert (tmp_path / f"{cut}.log").read_bytes() == b"before *** after ***\n"


def test_the_servers_environment_has_no_secrets_of_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    made = server_environment({"EXTRA": "1"}, "/opt/sglang/bin/python")
    assert "AWS_SECRET_ACCESS_KEY" not in made and "VIRTUAL_ENV" not in made
    assert made["EXTRA"] == "1" and made["PATH"].startswith("/opt/sglang/bin:")


def test_commands_are_shown_without_secrets() -> None:
    words = ["--api-key", "s3cret", "--header=s3cret"]
    assert redact(words, ("s3cret", "")) == ["--api-key", "***", "--header=***"]
