"""The servers of one run, watched until it ends.

One thread a server looks after it: a dead or hung one is ended with its whole process group, its GPU memory is seen
to be free, and it is started again, up to a budget. Whoever subscribed is told.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tasks.client.metrics import read_service_sample_sync
from tasks.errors import ServerError
from tasks.provisioning.gpus import GpuReader
from tasks.provisioning.ladder import turn
from tasks.provisioning.launcher import Running
from tasks.provisioning.mtp import AcceptWatch
from tasks.provisioning.reaper import GpuLocks
from tasks.provisioning.settings import ServingSettings
from tasks.provisioning.start import Recipe, Started, Starter, read_log
from tasks.provisioning.startup import Failure, diagnose
from tasks.provisioning.supervision import Health, HealthMonitor, State, backoff_s
from tasks.records import Server, ServerEvents, ServiceSample

log = logging.getLogger(__name__)

WATCH_S = 0.5
SAMPLE_S = 2.0
"""The process is looked at every WATCH_S, its counters every SAMPLE_S."""
MEMORY_FREE_TIMEOUT_S = 60.0
MEMORY_SLACK_BYTES = 1 << 30
EventHook = Callable[[dict[str, Any]], None]


@dataclass
class Member:
    """One server and what it takes to bring it back. `running` None: not ours (attach)."""

    server: Server
    running: Running | None = None
    recipe: Recipe | None = None
    monitor: HealthMonitor = field(default_factory=lambda: HealthMonitor(120.0))
    free_before: dict[str, int] = field(default_factory=dict)
    sampled_s: float = 0.0
    restarts: int = 0
    down: str = ""
    lost: bool = False


class Fleet:
    """The servers of a run. Use as a context manager; `close` ends what this run started, and nothing else."""

    def __init__(
        self,
        members: Sequence[Member],
        serving: ServingSettings,
        starter: Starter | None = None,
        locks: GpuLocks | None = None,
        read_gpus: GpuReader | None = None,
        leftovers: Sequence[str] = (),
    ) -> None:
        self.members = list(members)
        self.serving = serving
        self.starter = starter
        self.leftovers = list(leftovers)
        self.events: list[dict[str, Any]] = []
        self.changes_data: dict[str, Any] = {}
        self.plain_tok_s: float | None = None
        self.parity_reference: dict[str, str] = {}
        self._locks = locks or GpuLocks()
        self._read_gpus = read_gpus
        self._subscribers: list[ServerEvents] = []
        self._hooks: list[EventHook] = []
        self._accused: dict[str, str] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.note: Callable[[Fleet], object] | None = None
        """Called once at the end, to keep the starts and events in the run's record."""
        self._noted = False
        self.read_sample: Callable[[Server], ServiceSample] = read_service_sample_sync

    @property
    def servers(self) -> list[Server]:
        """Every server, also one that is down just now: its name and address stay."""
        return [member.server for member in self.members]

    @property
    def records(self) -> list[dict[str, Any]]:
        """Every attempt to start a server, with command (key blanked), reason, outcome and what its log told."""
        return list(self.starter.records) if self.starter else []

    @property
    def simulated(self) -> bool:
        """Whether any server makes up its acceptance; what it says cannot be published."""
        return any(server.simulated_acceptance for server in self.servers)

    def subscribe(self, events: ServerEvents) -> None:
        """Tell `events` about servers that go down and come back; those that are down now at once."""
        with self._lock:
            self._subscribers.append(events)
            down = [(m.server.name, m.down) for m in self.members if m.down]
        for name, reason in down:
            events.server_down(name, reason)

    def on_event(self, hook: EventHook) -> None:
        """Call `hook` with every event (a dict with `event`, `server`, `reason`); from a watching thread."""
        self._hooks.append(hook)

    def accuse(self, name: str, reason: str) -> None:
        """Somebody else saw that `name` hangs (the power watch): it is ended and started again. Any thread."""
        self._accused[name] = reason

    def watch(self) -> None:
        """Begin to look after the servers."""
        for member in self.members:
            thread = threading.Thread(target=self._look_after, args=(member,), name=f"watch-{member.server.name}")
            thread.daemon = True
            self._threads.append(thread)
            thread.start()

    def check(self) -> list[dict[str, Any]]:
        """Events so far. Raises ServerError when no server is left that could come back."""
        if self.members and all(member.lost for member in self.members):
            reasons = "; ".join(f"{m.server.name}: {m.down}" for m in self.members)
            raise ServerError(
                f"every server is lost ({reasons}); read their logs, then start the run again (it continues)",
                self.members[0].server.log_path,
            )
        return list(self.events)

    def close(self) -> None:
        """Stop watching and end every server of this run; returns when they are gone. Safe to call twice."""
        self._stop.set()
        with self._closing:
            self._close()

    def _close(self) -> None:
        if self.starter is not None:
            self.starter.cancel.set()
        ours = [member.running for member in self.members if member.running is not None]
        if ours:
            with ThreadPoolExecutor(len(ours)) as pool:
                list(pool.map(Running.stop, ours))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=30)
        late = [m.running for m in self.members if m.running is not None and m.running not in ours]
        for running in late:  # a restart that was under way when the run ended
            running.stop()
        self._locks.release()
        if self.note is not None and not self._noted:
            self._noted = True
            self.note(self)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look_after(self, member: Member) -> None:
        watch = AcceptWatch(self.serving.mtp)
        while not self._stop.wait(WATCH_S):
            try:
                self._look(member, watch)
            except Exception:
                log.exception("watching %s failed; it goes on", member.server.name)

    def _look(self, member: Member, watch: AcceptWatch) -> None:
        if member.lost:
            return
        ended = member.running.poll() if member.running is not None else None
        if ended is None and time.monotonic() - member.sampled_s < SAMPLE_S:
            return
        silent = ServiceSample(time.monotonic(), member.server.name, alive=False)
        sample = silent if ended else self.read_sample(member.server)
        member.sampled_s = time.monotonic()
        health = member.monitor.observe(sample, f"ended with {ended.code} ({ended.why})" if ended else None)
        accused = self._accused.pop(member.server.name, None)
        if accused and member.running is not None and not health.down:
            health = Health(State.HUNG, accused)
        if self._stop.is_set():
            return
        event = watch.observe(sample.time_s, sample.accept_length, sample.running)
        if event:
            self._tell({**event, "server": member.server.name})
        if health.down and not member.down:
            self._down(member, health.reason)
        if health.down and member.running is not None:
            self._bring_back(member, health.state)
        elif not health.down and member.down and member.running is None and sample.alive:
            self._up(member)

    def _down(self, member: Member, reason: str) -> None:
        member.down = reason
        self._tell({"event": "server.down", "server": member.server.name, "reason": reason})
        with self._lock:
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            subscriber.server_down(member.server.name, reason)

    def _up(self, member: Member) -> None:
        member.down = ""
        member.monitor.restart()
        self._tell({"event": "server.up", "server": member.server.name, "restarts": member.restarts})
        with self._lock:
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            subscriber.server_up(member.server.name)

    def _bring_back(self, member: Member, state: State) -> None:
        """End, see the memory free, start again. A failure counts against the budget like a crash."""
        assert member.running is not None and member.recipe is not None and self.starter is not None
        member.running.stop()
        while not self._stop.is_set():
            if member.restarts >= self.serving.restart_budget:
                member.lost = True
                reason = f"restarted {member.restarts} times, the budget is spent"
                self._tell({"event": "server.lost", "server": member.server.name, "reason": reason})
                return
            member.restarts += 1
            self._await_memory(member)
            if self._stop.wait(backoff_s(member.restarts - 1)):
                return
            try:
                port = int(member.server.base_url.rsplit(":", 1)[1])
                recipe, why = after_crash(member.recipe, member.server)
                reason = f"restart {member.restarts}: {member.down or state.value}{why}"
                started = self.starter.start(recipe, port, reason)
            except ServerError as error:
                log.warning("%s", error)
                continue
            self._rejoin(member, started)
            return

    def _rejoin(self, member: Member, started: Started) -> None:
        member.running = started.running
        member.server = replace(started.server, name=member.server.name)
        if started.config is not None and member.recipe is not None:
            member.recipe = replace(member.recipe, config=started.config)
        self._up(member)

    def _await_memory(self, member: Member) -> None:
        """Until the GPU's memory is what it was before the server; a process that keeps it is reported."""
        if self._read_gpus is None or not member.free_before:
            return
        deadline = time.monotonic() + MEMORY_FREE_TIMEOUT_S
        while not self._stop.wait(0.5):
            free = {gpu.uuid: gpu.free_bytes for gpu in self._read_gpus()}
            held = {
                uuid: before - free.get(uuid, before)
                for uuid, before in member.free_before.items()
                if before - free.get(uuid, before) > MEMORY_SLACK_BYTES
            }
            if not held:
                return
            if time.monotonic() > deadline:
                self._tell({"event": "gpu.memory_held", "server": member.server.name, "reason": f"still held: {held}"})
                return

    def _tell(self, event: dict[str, Any]) -> None:
        event = {"time_s": time.time(), **event}
        self.events.append(event)
        log.warning("%s", {name: value for name, value in event.items() if name != "time_s"})
        for hook in self._hooks:
            try:
                hook(event)
            except Exception:
                log.exception("an event hook failed")


def after_crash(recipe: Recipe, server: Server) -> tuple[Recipe, str]:
    """The recipe for the next start, and what changed: a server that ran out of memory comes back smaller."""
    if recipe.config is None or server.log_path is None:
        return recipe, ""
    found = diagnose(read_log(Path(server.log_path)), -9)
    if found.failure not in (Failure.OOM_RUNNING, Failure.OOM_POOLS, Failure.OOM_GRAPHS):
        return recipe, ""
    step = turn(recipe.config, found, recipe.limits, (recipe.config,))
    if step is None:
        return recipe, f"; {found.failure.value}, and no knob is left"
    return replace(recipe, config=step.config), f"; {found.failure.value}: {step.reason}"
