"""Several simulated servers, in the caller's loop or in a thread of their own."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from simulator.codec import Codec
from simulator.faults import Fault, FaultPlan
from simulator.server import SimServer
from simulator.settings import SimSettings
from tasks.records import Server


class SimFleet:
    """`with SimFleet(4, settings) as fleet:` runs the servers in one thread; `fleet.records()` are the Servers.

    `settings` may be one for all or one each. All servers share the seed, so an answer does not depend on where a
    request lands.
    """

    def __init__(
        self,
        count: int = 1,
        settings: SimSettings | Sequence[SimSettings] | None = None,
        *,
        faults: FaultPlan | None = None,
        codec: Codec | None = None,
    ) -> None:
        each = list(settings) if isinstance(settings, Sequence) else [settings or SimSettings()] * count
        self.servers = [
            SimServer(replace(own), name=f"sim{index}", faults=faults, codec=codec) for index, own in enumerate(each)
        ]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "SimFleet":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="simulator", daemon=True)
        self._thread.start()
        self.call(self._start())
        return self

    async def _start(self) -> None:
        for server in self.servers:
            await server.start()

    async def _stop(self) -> None:
        for server in self.servers:
            await server.stop()

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None and self._thread is not None
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def call(self, work: Any, timeout_s: float = 30.0) -> Any:
        """Run a coroutine or a plain function in the simulator's loop and wait for it."""
        assert self._loop is not None
        if asyncio.iscoroutine(work):
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)
        future: Future[Any] = Future()
        self._loop.call_soon_threadsafe(_run, work, future)
        return future.result(timeout_s)

    def inject(self, index: int, fault: Fault) -> None:
        """Command a fault of server `index`."""
        self.call(lambda: self.servers[index].inject(fault))

    def heal(self, index: int) -> None:
        """End the faults of server `index`."""
        self.call(self.servers[index].heal)

    def records(self) -> list[Server]:
        """As provisioning would describe them."""
        return [server.record() for server in self.servers]

    def answered(self) -> dict[str, int]:
        """How often each request id was answered completely, over all servers."""
        total: dict[str, int] = {}
        for server in self.servers:
            for rid, count in server.answered.items():
                total[rid] = total.get(rid, 0) + count
        return total


def _run(work: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
