"""One run a data set; a dead run holds nothing for ever."""

import json
import os
import subprocess
import sys
import threading

import pytest

from tasks.errors import StorageError
from tasks.storage import open_store
from tasks.upload import lease as leases
from tasks.upload.lease import acquire, hold_lease


class Clock:
    """Time that passes only when somebody sleeps; `during` runs at each sleep."""

    def __init__(self, during=lambda: None):
        self.now, self.during = 1000.0, during

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.during()


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


@pytest.fixture
def elsewhere(monkeypatch):
    """Leases taken from now on look as if another host had taken them."""

    def pretend(name):
        monkeypatch.setattr(leases, "host_name", lambda: name)

    return pretend


def test_two_runs_never_hold_it_at_once(store):
    with hold_lease(store, "one", 60), pytest.raises(StorageError, match="in use by one"):
        acquire(store, "two", 60, wait=False)
    with hold_lease(store, "two", 60):
        pass


def test_a_dead_process_on_this_host_loses_it_at_once(store):
    code = (
        "import sys; from tasks.storage import open_store; from tasks.upload.lease import acquire; import os, signal;"
        "acquire(open_store(sys.argv[1]), 'killed', 900); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, store.url], check=False)
    assert json.loads(store.get_bytes("lease.json"))["holder"] == "killed"
    assert acquire(store, "next", 60, wait=False).holder == "next"


def test_a_reused_pid_is_not_the_holder(store):
    lease = acquire(store, "old", 900)
    body = json.loads(store.get_bytes("lease.json")) | {"pid": os.getpid(), "started_s": 1.0}
    store.put_bytes("lease.json", json.dumps(body).encode())
    assert acquire(store, "next", 60, wait=False).holder == "next"
    with pytest.raises(StorageError, match="taken over"):
        lease.check()


def test_a_crashed_run_on_another_host_is_waited_for(store, elsewhere):
    clock = Clock()
    elsewhere("a")
    acquire(store, "crashed", 60, clock=clock)
    elsewhere("b")
    lease = acquire(store, "next", 60, clock=clock, sleep=clock.sleep)
    assert lease.holder == "next"
    assert 60 <= clock.now - 1000 <= 100


def test_a_wrong_clock_elsewhere_does_not_hold_it_for_ever(store, elsewhere):
    clock = Clock()
    elsewhere("a")
    acquire(store, "from the future", 60, clock=lambda: 9e9)
    elsewhere("b")
    assert acquire(store, "next", 60, clock=clock, sleep=clock.sleep).holder == "next"
    assert clock.now - 1000 <= 70


def test_a_run_that_renews_is_alive_and_named(store, elsewhere):
    elsewhere("a")
    clock = Clock()
    living = acquire(store, "living", 60, clock=clock)
    clock.during = living.renew
    elsewhere("b")
    with pytest.raises(StorageError, match="in use by living"):
        acquire(store, "next", 60, clock=clock, sleep=clock.sleep)
    assert clock.now - 1000 <= 10


def test_a_lease_that_was_taken_over_stops_publication(store, elsewhere):
    clock = Clock()
    elsewhere("a")
    paused = acquire(store, "paused", 60, clock=clock)
    clock.now += 1000
    elsewhere("b")
    acquire(store, "next", 60, clock=clock)
    with pytest.raises(StorageError, match="must not publish"):
        paused.check()
    paused.release()
    assert json.loads(store.get_bytes("lease.json"))["holder"] == "next"


def test_only_one_of_many_wins(store):
    won, lost = [], []

    def race(number):
        try:
            won.append(acquire(store, f"run {number}", 60, wait=False))
        except StorageError:
            lost.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)


def test_an_unreadable_lease_does_not_block(store):
    store.put_bytes("lease.json", b"{torn")
    assert acquire(store, "next", 60, wait=False).holder == "next"


def test_somebody_elses_folder_is_not_touched(tmp_path):
    (tmp_path / "thesis.docx").write_text("years of work")
    with pytest.raises(StorageError, match=r"thesis\.docx"), hold_lease(open_store(tmp_path), "run", 60):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.docx"]
