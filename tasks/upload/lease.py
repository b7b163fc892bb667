"""One run a data set: a small object with an owner, renewed while the owner lives and taken over when it does not.

A lease is dead when its process is known to be gone (same host), when its time is over by more than the clocks may
differ, or when it did not change for its whole duration as seen by a waiting run. Correctness never rests on it alone:
runs write under keys of their own, and the manifest has its own optimistic concurrency.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psutil

from tasks.errors import StorageError
from tasks.runs import host_name
from tasks.storage import ConflictError, MissingError, Store
from tasks.upload.layout import LEASE
from tasks.upload.manifest import refuse_foreign

log = logging.getLogger(__name__)
SKEW_S = 30.0
"""Clocks of two hosts may differ by this much."""

POLL_S = 5.0


class Lease:
    """A held lease. `check` proves that it is still ours before something is published."""

    def __init__(self, store: Store, body: dict[str, Any], version: str, clock: Callable[[], float]) -> None:
        self._store, self._body, self._version, self._clock = store, body, version, clock
        self._lock = threading.Lock()
        self.lost: str | None = None

    @property
    def holder(self) -> str:
        """Who holds it."""
        return str(self._body["holder"])

    def renew(self) -> None:
        """Extend by the lease's duration. Raises StorageError when somebody else took it."""
        with self._lock:
            if self.lost:
                raise StorageError(self.lost)
            body = {**self._body, "expires_s": self._clock() + self._body["seconds"]}
            try:
                self._version = self._store.put_bytes(LEASE, _dump(body), if_match=self._version)
            except (ConflictError, MissingError) as error:
                self.lost = f"the lease on {self._store.url} was taken over by another run; this one must not publish"
                raise StorageError(self.lost) from error
            self._body = body

    check = renew

    def release(self) -> None:
        """Let the next run in at once. Errors do not matter: the lease ends by itself."""
        with self._lock, contextlib.suppress(StorageError):
            if not self.lost:
                self._store.put_bytes(LEASE, _dump({**self._body, "expires_s": 0.0}), if_match=self._version)


@contextlib.contextmanager
def hold_lease(
    store: Store,
    holder: str,
    seconds: float,
    *,
    wait: bool = True,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Lease]:
    """Hold the data set's lease and renew it from a thread of its own.

    Waits (when `wait`) at most `seconds` for a holder on another host that may be dead; one that renews while we look,
    or that runs on this host, is alive, which is a StorageError that names it. So is a destination that holds
    somebody else's files: nothing is written there.
    """
    refuse_foreign(store)
    lease = acquire(store, holder, seconds, wait=wait, clock=clock, sleep=sleep)
    stop = threading.Event()
    thread = threading.Thread(target=_renewing, args=(lease, seconds / 3, stop), name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        stop.set()
        thread.join(timeout=30)
        lease.release()


def acquire(
    store: Store,
    holder: str,
    seconds: float,
    *,
    wait: bool = True,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Take the lease or raise StorageError naming who has it."""
    body = {"holder": holder, "token": uuid4().hex, "seconds": seconds, "host": host_name(), **_process()}
    first: str | None = None
    waited = 0.0
    while True:
        found, version = _read(store)
        if found is None or _dead(found, clock()) or (waited >= float(found["seconds"]) and version == first):
            with contextlib.suppress(ConflictError):
                fresh = {**body, "expires_s": clock() + seconds}
                new = store.put_bytes(LEASE, _dump(fresh), if_match=version, if_none_match=version is None)
                return Lease(store, fresh, new, clock)
            continue
        if not wait or _here(found) or (first is not None and version != first):
            raise StorageError(
                f"{store.url} is in use by {found['holder']}, which renewed its lease for {found['seconds']:.0f} s: "
                "wait for it to end, or stop it; a crashed run loses its lease by itself"
            )
        if first is None:
            log.warning(
                "waiting for the lease on %s held by %s since %s", store.url, found["holder"], time.ctime(clock())
            )
        first = version
        sleep(POLL_S)
        waited += POLL_S


def _renewing(lease: Lease, every_s: float, stop: threading.Event) -> None:
    while not stop.wait(every_s):
        try:
            lease.renew()
        except StorageError as error:
            # An unreachable store is tried again; publishing checks the lease anyway.
            log.warning("the lease was not renewed: %s", error)
            if lease.lost:
                return


def _read(store: Store) -> tuple[dict[str, Any] | None, str | None]:
    try:
        data, version = store.get_bytes_with_version(LEASE)
    except MissingError:
        return None, None
    try:
        body = json.loads(data)
        float(body["seconds"]), float(body["expires_s"]), str(body["holder"])
    except (ValueError, KeyError, TypeError):
        return {"holder": "an unreadable lease", "seconds": 0.0, "expires_s": 0.0}, version
    return body, version


def _dead(body: dict[str, Any], now_s: float) -> bool:
    if now_s > float(body["expires_s"]) + (SKEW_S if body["expires_s"] else 0.0):
        return True
    if not _here(body):
        return False
    try:
        return abs(psutil.Process(int(body["pid"])).create_time() - float(body["started_s"])) > 1.0
    except psutil.Error:
        return True


def _here(body: dict[str, Any]) -> bool:
    """Whether the holder is a process of this host, so that it can be asked about instead of waited for."""
    return body.get("host") == host_name() and "pid" in body


def _process() -> dict[str, Any]:
    return {"pid": os.getpid(), "started_s": psutil.Process().create_time()}


def _dump(body: dict[str, Any]) -> bytes:
    # A nonce makes every version unique, also in stores whose version is a digest of the content.
    return json.dumps({**body, "nonce": uuid4().hex}, indent=1, sort_keys=True).encode()
