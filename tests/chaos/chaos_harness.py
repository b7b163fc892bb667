"""One chaos case: a run on simulated servers meets a fault, is killed at a random moment, and is resumed to its end.

The engine runs in a child process that gets SIGKILL (two of three seeds) or SIGTERM (a cancel). What is checked, by id:
kept = done + failed + pending after the kill; done + failed = kept at the end; nothing twice; what the servers answered
twice is at most what was in flight.
"""

import asyncio
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs_for_tests import FAST, NO_BREAKER, check_accounts, drain, new_run, prompts
from simulator import Fault, FaultPlan, SimFleet, SimSettings, SimTarget
from simulator.faults import REQUEST_FAULTS, SERVER_FAULTS
from tasks.generation.engine import Engine, EngineStopped
from tasks.generation.plan import ledger
from tasks.generation.settings import GenerationSettings
from tasks.records import Server
from tasks.runs import RunPaths
from tasks.settings import SamplingSettings

FAULTS = ("none", *REQUEST_FAULTS, *SERVER_FAULTS)
ROWS, LIMIT, SERVERS = 48, 6, 2
RATE = 0.2

# The fork server imports this module once, so that a child starts in milliseconds; it finds it by PYTHONPATH only.
_HERE = Path(__file__).resolve().parent
_PATHS = [str(_HERE), str(_HERE.parent), str(_HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _PATHS if path)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["chaos_harness"])


@dataclass(frozen=True, slots=True)
class Result:
    """What one case showed. `redone` are answers that servers gave for a question they had already answered."""

    fault: str
    seed: int
    done: int
    failed: int
    pending_at_kill: int
    redone: int
    in_flight_at_kill: int
    seconds: float


def settings(fault: str) -> GenerationSettings:
    """A short patience only where a server really stands still: a busy machine must not look like a dead server."""
    stall_s = 1.0 if fault in ("hang", "wedge") else 30.0
    return GenerationSettings(
        **{**FAST, "stall_s": stall_s, "sample_s": 0.1}, chunk_rows=16, breaker=NO_BREAKER, max_attempts=4
    )


def child(root: str, servers: list[Server], fault: str) -> None:
    """Run the engine to its end, or until it is killed or cancelled."""
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(EngineStopped, asyncio.CancelledError):
        asyncio.run(_child(RunPaths(Path(root), "run1"), servers, fault))


async def _child(paths: RunPaths, servers: list[Server], fault: str) -> None:
    running = Engine(paths, SimTarget(), SamplingSettings(max_tokens=4096), settings(fault), servers, limits=LIMIT)
    running.start()
    loop = asyncio.get_running_loop()
    cancelled = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, cancelled.set)
    work = asyncio.create_task(drain(running))
    waiting = asyncio.create_task(cancelled.wait())
    await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
    await running.stop("cancelled" if cancelled.is_set() else "")
    await work


def case(fault: str, seed: int, root: Path) -> Result:
    """Run one case; raises AssertionError with what went wrong."""
    rng = random.Random(f"{fault}{seed}")
    made = prompts(ROWS)
    paths = new_run(root, made)
    rates: dict[Any, float] = {fault: RATE} if fault in REQUEST_FAULTS else {}
    sim = SimSettings(seed=seed, median_tokens=40, sigma=0.7, speedup=6, max_running=LIMIT)
    begun = time.monotonic()
    with SimFleet(SERVERS, sim, faults=FaultPlan(seed, rates)) as fleet:
        process = _start(root, fleet, fault)
        _strike(fleet, fault, rng)
        _wait_for_first(fleet, process)
        time.sleep(rng.uniform(0.02, 0.5))
        held = fleet.call(lambda: sum(s.batch.running + s.batch.queued for s in fleet.servers))
        kill = signal.SIGTERM if seed % 3 == 2 else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, kill)
        process.join(20)
        assert not process.is_alive(), "a cancelled engine did not exit within 20 s"
        pending = _check_middle(paths, {p.prompt_id for p in made})
        last = _start(root, fleet, fault)
        last.join(90)
        if last.is_alive():
            os.kill(last.pid or 0, signal.SIGABRT)  # the child's faulthandler shows where it stands
            last.join(5)
        assert last.exitcode == 0, f"the resumed run ended with {last.exitcode}"
        done, failed = check_accounts(paths, made)
        redone = _redone(fleet, fault, kill == signal.SIGKILL)
    return Result(fault, seed, len(done), len(failed), pending, redone, held, time.monotonic() - begun)


def _start(root: Path, fleet: SimFleet, fault: str) -> Any:
    process = _context.Process(target=child, args=(str(root), fleet.records(), fault))
    process.start()
    return process


def _strike(fleet: SimFleet, fault: str, rng: random.Random) -> None:
    if fault in SERVER_FAULTS:
        after, lasts = rng.randrange(1, ROWS // 2), rng.uniform(0.1, 1.0)
        fleet.inject(rng.randrange(SERVERS), Fault(fault, after_requests=after, lasts_s=lasts))  # type: ignore[arg-type]


def _wait_for_first(fleet: SimFleet, process: Any) -> None:
    until = time.monotonic() + 20
    while not any(server.requests for server in fleet.servers) and process.is_alive():
        assert time.monotonic() < until, "no request within 20 s"
        time.sleep(0.005)


def _check_middle(paths: RunPaths, wanted: set[str]) -> int:
    books = ledger(paths)
    assert not books.done & books.failed
    assert books.done | books.failed | books.pending == wanted, "kept is not done + failed + pending"
    return len(books.pending)


def _redone(fleet: SimFleet, fault: str, killed: bool) -> int:
    """Questions (id without its count of moves) that servers answered more than once."""
    counts: dict[str, int] = {}
    for rid, count in fleet.answered().items():
        counts[rid[:30]] = counts.get(rid[:30], 0) + count
    redone = sum(count - 1 for rid, count in counts.items() if not rid.startswith("probe"))
    # In flight at the kill, and for faults that move requests what the other server went on with.
    moves = 1 if fault in (*SERVER_FAULTS, "truncated", "reset", "garbage") else 0
    most = LIMIT * SERVERS * (1 + moves)
    if fault not in ("truncated", "reset", "garbage"):
        assert redone <= most, f"{redone} answers were asked for twice, at most {most} were in flight"
    return redone
