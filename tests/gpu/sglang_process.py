"""One SGLang server in a process group of its own, for the scripts beside this file."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


class Sglang:
    """One server in its own process group; `url` once it is ready."""

    def __init__(
        self, model: Path, flags: list[str], log: Path, env: dict[str, str], port: int, limit_s: float
    ) -> None:
        self.command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
        self.command += flags
        self.url, self.log, self.limit_s = f"http://127.0.0.1:{port}", log, limit_s
        self.env = {**os.environ, **env}
        self.ready_s: float | None = None

    def __enter__(self) -> "Sglang":
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                self.command, stdout=sink, stderr=subprocess.STDOUT, env=self.env, start_new_session=True
            )
        began_s = time.time()
        while time.time() - began_s < self.limit_s and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        self.ready_s = time.time() - began_s
                        return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        tail = self.log.read_text(errors="replace").splitlines()[-12:]
        self.__exit__()
        raise RuntimeError(f"server not ready after {time.time() - began_s:.0f} s: " + " | ".join(tail)[-1500:])

    def __exit__(self, *_: object) -> None:
        for number, grace_s in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            until_s = time.time() + grace_s
            while time.time() < until_s and self.process.poll() is None:
                time.sleep(0.2)
        time.sleep(2)

    def scheduler(self) -> int | None:
        """Process id of the scheduler, for stopping it."""
        import psutil

        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "scheduler" in " ".join(child.cmdline()) or "scheduler" in child.name():
                return int(child.pid)
        return None
