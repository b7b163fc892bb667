"""Worker processes end with the process that started them, and a dead one is an error that says what to do."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures.process import BrokenProcessPool

import psutil
import pytest

from completions import assistant, batch, completion
from paths import REPOSITORY
from targets import chatml_target
from tasks.errors import RegenError
from tasks.records import Message
from tasks.tokenization.settings import TokenizationSettings
from tasks.tokenization.workers import Job, _pool, build_all


def test_workers_end_when_their_parent_is_killed(tmp_path):
    folder = chatml_target().directory
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, sys, time
        from tasks.settings import TargetSettings
        from tasks.tokenization.workers import _pool

        if __name__ == "__main__":
            pool = _pool(2, TargetSettings(model={str(folder)!r}).model_dump_json())
            print(*{{f.result() for f in [pool.submit(os.getpid) for _ in range(2)]}}, flush=True)
            time.sleep(100)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    workers = [int(pid) for pid in (parent.stdout.readline() if parent.stdout else "").split()]
    assert workers and all(psutil.pid_exists(pid) for pid in workers)
    with parent:
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(alive(pid) for pid in workers):
        time.sleep(0.1)
    assert not any(alive(pid) for pid in workers)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_worker_that_is_killed_is_one_clear_error(tmp_path):
    target, now = chatml_target(), None
    job = Job(target.settings, TokenizationSettings(min_content_tokens=0), False, now)
    rows = batch([completion("p", [Message("user", "x"), assistant("the answer")], thinking=False)])
    assert [built.tokens.num_rows for built in build_all(job, [rows, rows], 2)] == [1, 1]
    pool = _pool(2, target.settings.model_dump_json())
    os.kill(pool.submit(os.getpid).result(), signal.SIGKILL)
    # Until the pool has noticed: the other worker is fast enough to do these few rows before.
    with pytest.raises(BrokenProcessPool):
        while True:
            pool.submit(os.getpid).result()
    with pytest.raises(RegenError, match="a tokenization process died"):
        list(build_all(job, [rows] * 4, 2))
    assert [built.tokens.num_rows for built in build_all(job, [rows], 2)] == [1]
