"""The demo's Prefect server: real, on SQLite, with its UI; it keeps its records and ends with its user."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys

import pytest

from flows.local_prefect import answers, end_kept, find_kept, local_prefect
from tasks.errors import ControlPlaneError
from tasks.provisioning.wire import call

CHILD = """
import sys, time
from pathlib import Path
from flows.local_prefect import local_prefect
with local_prefect(Path(sys.argv[1])) as server:
    print(server.api_url, flush=True)
    time.sleep(600)
"""
LOST = """
import asyncio, sys
from prefect import flow, tags
from flows.demo_records import close_lost_runs, live_runs
from prefect.client.orchestration import get_client

@flow(name="lost")
async def lost():
    print("running", flush=True)
    await asyncio.sleep(600)

async def close():
    print(await close_lost_runs("regen-demo"), flush=True)
    async with get_client() as client:
        print(len(await live_runs(client, "regen-demo")), flush=True)

with tags("regen-demo"):
    asyncio.run(lost() if sys.argv[1] == "run" else close())
"""


@pytest.fixture(autouse=True)
def no_other_server(monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One home for all tests: making the database takes most of the time."""
    return tmp_path_factory.mktemp("prefect")


def python(code, *arguments, env=None):
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(env or {})},
    )


def test_records_outlive_the_server_and_a_killed_runs_state_is_put_right(home):
    with local_prefect(home) as server:
        assert server.owned
        assert "<html" in call(server.ui_url).body
        assert call(f"{server.ui_url}/ui-settings").body["api_url"] == server.api_url
        assert call(f"{server.api_url}/admin/settings").body["server"]["analytics_enabled"] is False
        killed = python(LOST, "run", env=server.environment())
        assert killed.stdout.readline() == "running\n"
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        killed.stdout.close()
        first = server.api_url
    assert not answers(first)
    with local_prefect(home) as server:
        assert server.api_url == first
        closing = python(LOST, "close", env=server.environment())
        assert closing.communicate(timeout=60)[0].split() == ["1", "0"]
        runs = call(f"{server.api_url}/flow_runs/filter", {}).body
        assert [(run["state_type"], "killed" in run["state"]["message"]) for run in runs] == [("CRASHED", True)]
    with sqlite3.connect(home / "prefect.db") as database:
        assert database.execute("select count(*) from flow_run").fetchone() == (1,)
    database.close()


def test_it_ends_when_its_user_is_killed_and_the_next_start_takes_over(home):
    child = python(CHILD, str(home))
    url = child.stdout.readline().strip()
    assert answers(url)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with local_prefect(home) as server:
        assert server.owned and server.api_url == url
        assert len(call(f"{server.api_url}/flow_runs/filter", {}).body) == 1


def test_a_kept_ui_stays_and_is_used_again(home):
    with local_prefect(home, keep_ui=True) as server:
        url = server.api_url
    assert answers(url) and find_kept(home) == url
    with local_prefect(home) as again:
        assert again.api_url == url and not again.owned
    assert answers(url)
    assert end_kept(home) and not end_kept(home)
    assert not answers(url)


def test_a_server_named_in_the_environment_is_used(home, tmp_path, monkeypatch):
    with local_prefect(home) as running:
        monkeypatch.setenv("PREFECT_API_URL", running.api_url)
        with local_prefect(tmp_path) as used:
            assert (used.api_url, used.owned, used.home) == (running.api_url, False, None)
        assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_one_clear_error(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ControlPlaneError, match=f"port {port} is taken"), local_prefect(tmp_path, port=port):
            pass


def test_a_server_that_dies_at_start_names_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr("flows.local_prefect._command", lambda port: ("/bin/false",))
    with pytest.raises(ControlPlaneError, match=r"ended at start; read .*server\.log"), local_prefect(tmp_path):
        pass


def test_a_stale_record_of_a_kept_server_is_not_believed(tmp_path):
    url = "http://127.0.0.1:9/api"
    (tmp_path / "kept.json").write_text(json.dumps({"pid": os.getpid(), "ticks": -1, "api_url": url}))
    assert find_kept(tmp_path) is None
