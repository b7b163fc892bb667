"""A small process that owns one inference server: `python -m tasks.provisioning.supervisor`.

It runs in a session of its own and starts the server in another, so that whatever happens to the flow (exception,
cancel, SIGTERM, SIGKILL) somebody is left to end the server's whole process group. Standard library only: it must start
at once and never fail for want of a package.

Standard input is the pipe to the flow. Its first line is the launch as JSON (`launcher.Launch`), which keeps the API
key out of this process's arguments; later lines are requests (`stop`). End of file means that the flow is gone.
Standard output carries one JSON object a line: `started`, then `ended` with the exit code and why.
The server's own output goes to a log file with the secrets blanked, never to a pipe of the flow: a pipe that a child
still holds would keep a Prefect worker waiting for ever.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

CHUNK_BYTES = 1 << 16
TICK_S = 0.5
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def start_ticks(pid: int) -> int | None:
    """Clock ticks after boot at which `pid` started (field 22 of /proc/PID/stat); tells a process from a later one
    that got its number. None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rsplit(")", 1)[1].split()
    return None if fields[0] == "Z" else int(fields[19])


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Replace the state file in one step, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(state))
    temporary.chmod(0o600)
    temporary.replace(path)


class LogWriter:
    """Appends bytes to a file and blanks secrets, also one that falls on the border of two reads."""

    def __init__(self, path: Path, secrets: list[str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._secrets = [secret.encode() for secret in secrets if secret]
        self._keep = max((len(secret) - 1 for secret in self._secrets), default=0)
        self._tail = b""

    def write(self, data: bytes, last: bool = False) -> None:
        """Write what is certain to hold no part of a secret; `last` writes everything."""
        data = self._tail + data
        for secret in self._secrets:
            data = data.replace(secret, b"***")
        # A line end is never part of a secret, so whole lines go out at once.
        certain = len(data) if last else max(data.rfind(b"\n") + 1, len(data) - self._keep)
        self._tail = data[certain:]
        with contextlib.suppress(OSError):  # a full disk must not stop the supervisor
            self._file.write(data[:certain])

    def close(self) -> None:
        """Write what was held back."""
        self.write(b"", last=True)
        self._file.close()


class Supervisor:
    """Starts one server, copies its output, and ends it with everything it started."""

    def __init__(self, launch: dict[str, Any]) -> None:
        self.launch = launch
        self.log = LogWriter(Path(launch["log_path"]), launch.get("secrets", []))
        self.state_path = Path(launch["state_path"])
        self.process: subprocess.Popen[bytes] | None = None
        self.selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Live until the server has ended; return 0."""
        wake = self._catch_signals()
        self.selector.register(0, selectors.EVENT_READ, "flow")
        self.selector.register(wake, selectors.EVENT_READ, "signal")
        try:
            self._start()
        except OSError as error:
            tell("ended", code=127, why=f"cannot start {self.launch['command'][0]}: {error.strerror}")
            return 0
        why = "exited"
        while self.process is not None and self.process.poll() is None:
            reason = self._wait(TICK_S)
            if reason:
                why = reason
                self._stop()
        code = self._finish()
        tell("ended", code=code, why=why)
        return 0

    def _catch_signals(self) -> int:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        for number in (*ENDING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        return reading

    def _start(self) -> None:
        library = ctypes.CDLL(None)
        # Orphans of the server become children of this process, so that the sweep at the end finds them.
        library.prctl(PR_SET_CHILD_SUBREAPER, 1)

        def die_with_supervisor() -> None:
            # This process has one thread, which lives as long as it does, so the signal comes only when it dies.
            library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        self.process = subprocess.Popen(
            self.launch["command"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.launch["env"],
            cwd=self.launch.get("cwd"),
            start_new_session=True,
            preexec_fn=die_with_supervisor,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.selector.register(self.process.stdout, selectors.EVENT_READ, "output")
        pid = self.process.pid
        state = {
            **self.launch.get("state", {}),
            "supervisor_pid": os.getpid(),
            "supervisor_ticks": start_ticks(os.getpid()),
            "pid": pid,
            "pgid": pid,
            "start_ticks": start_ticks(pid),
            "started_at": time.time(),
            "log_path": self.launch["log_path"],
            "stop_command": self.launch.get("stop_command", []),
        }
        write_state(self.state_path, state)
        tell("started", pid=pid, pgid=pid)

    def _wait(self, seconds: float) -> str:
        """Serve the pipes for up to `seconds`; return why to stop, or nothing."""
        reason = ""
        for key, _ in self.selector.select(seconds):
            if key.data == "output":
                self._copy()
            elif key.data == "flow":
                data = os.read(0, CHUNK_BYTES)
                if not data:
                    self.selector.unregister(0)
                    reason = "the flow is gone"
                elif b"stop" in data:
                    reason = "asked"
            elif set(os.read(key.fd, 64)) & {int(number) for number in ENDING}:
                reason = "signal"
        return reason

    def _copy(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        try:
            data = os.read(self.process.stdout.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            self.log.write(data)
        else:
            self.selector.unregister(self.process.stdout)

    def _stop(self) -> None:
        """Ask the group to end, then make it."""
        command = self.launch.get("stop_command")
        if command:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
        self._signal_group(signal.SIGTERM)
        deadline = time.monotonic() + float(self.launch.get("grace_s", 8))
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            self._wait(0.1)
        self._signal_group(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def _finish(self) -> int:
        """Nothing of the server may be left: its group, then whatever left the group and became ours."""
        assert self.process is not None and self.process.stdout is not None
        self._signal_group(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while children := children_of(os.getpid()):
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        with contextlib.suppress(OSError):
            while data := os.read(self.process.stdout.fileno(), CHUNK_BYTES):
                self.log.write(data)
        self.log.close()
        self.state_path.unlink(missing_ok=True)
        return int(self.process.returncode)


def children_of(pid: int) -> list[int]:
    """Living direct children of `pid`, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[1]) == pid and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def session_members(session: int, not_before: int) -> list[int]:
    """Living processes of a session that started at or after `not_before` (clock ticks after boot)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == session and fields[0] != "Z" and int(fields[19]) >= not_before:
                    found.append(int(entry.name))
    return found


def tell(event: str, **facts: Any) -> None:
    """One line to the flow; it may be gone, which is no reason to fail."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps({"event": event, **facts}).encode() + b"\n")


def read_launch() -> dict[str, Any]:
    """The first line of standard input, read without taking anything that follows it."""
    data = bytearray()
    while not data.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit("supervisor: no launch came on standard input")
        data += byte
    launch: dict[str, Any] = json.loads(data)
    return launch


if __name__ == "__main__":
    sys.exit(Supervisor(read_launch()).run())
