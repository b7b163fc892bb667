"""What needs servers and GPUs: start them, let them prove themselves, find their best load, forecast the end."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flows.approval import approved
from flows.reporter import Reporter, seconds_before
from flows.session import Session
from flows.stages import Made, Prompts, judge, judged
from tasks.calibration.forecast import Rates
from tasks.calibration.outlook import Outlook, rates_from, record
from tasks.calibration.run import as_dict, by_server, calibration_key
from tasks.calibration.task import calibrate_servers, forecast_gate
from tasks.generation.engine import Engine
from tasks.power.baseline import Baselines, model_digest, sku_of
from tasks.power.live import LiveWatch, expected_from_windows
from tasks.power.nvml import open_nvml
from tasks.power.rig import Rig
from tasks.power.sampler import PowerSampler
from tasks.power.statistics import by_gpu, summarize
from tasks.power.task import baseline_gate, hard_rules
from tasks.provisioning.fleet import Fleet
from tasks.provisioning.task import mtp_gate, provision, thinking_canary
from tasks.records import CalibrationResult, GateReport, Level, Progress, Server
from tasks.runs import write_json
from tasks.ui import task as ui

POWER_WINDOW_S = 60.0
"""Seconds of watts behind the figure in the progress line."""

DRAIN_S = 900.0
"""Longest wait for requests in flight before the baseline probe, which must have the servers for itself."""

FEWEST_ENDED = 4
"""Answers of this invocation that a forecast held against a budget rests on."""

STILL_S = 5.0
"""With nothing in flight for so long, no more answers come before what waits for this gate goes on."""


@contextlib.asynccontextmanager
async def sampling_power(run: Session) -> AsyncIterator[PowerSampler]:
    """NVML readings of the whole run in power.parquet; nothing where there is no NVIDIA GPU."""
    nvml = await asyncio.to_thread(open_nvml)
    with contextlib.ExitStack() as stack:
        sampler = stack.enter_context(PowerSampler(run.paths.power, nvml, run.spec.power.sample_hz))
        if nvml is not None:
            stack.callback(nvml.close)
            run.note(gpus=[asdict(info) for info in sampler.gpus], driver=next((i.driver for i in sampler.gpus), None))
        yield sampler


@contextlib.asynccontextmanager
async def servers(run: Session) -> AsyncIterator[tuple[Fleet, Rig]]:
    """The run's servers and the sensors beside them; both end with the block, whatever ends it."""
    spec = run.spec
    async with sampling_power(run) as sampler:
        fleet = await provision(spec.serving, spec.target, run.paths, spec.sampling)
        try:
            fleet.on_event(lambda found: ui.event(f"regen.{found['event']}", found, f"regen.server.{found['server']}"))
            note_servers(run, fleet)
            yield fleet, rig_of(run, fleet, sampler)
        finally:
            # Shielded: a cancelled flow still ends its servers itself; the supervisors would do it otherwise.
            await asyncio.shield(asyncio.to_thread(fleet.close))
            note_servers(run, fleet)


def note_servers(run: Session, fleet: Fleet) -> None:
    """What the manifest and the report say about servers; the API key stays out."""
    shown = [{name: value for name, value in asdict(s).items() if name != "api_key"} for s in fleet.servers]
    run.note(
        servers=shown,
        server_starts=fleet.records,
        server_events=fleet.events,
        leftovers=fleet.leftovers,
        changes_data=fleet.changes_data,
    )


def rig_of(run: Session, fleet: Fleet, sampler: PowerSampler) -> Rig:
    """The fleet as the power gate sees it."""
    target = run.spec.target
    return Rig(
        servers=fleet.servers,
        sampler=sampler,
        settings=run.spec.power,
        model_digest=model_digest(target.model, target.revision, target.quantization, state_dtype=target.state_dtype),
        mtp_wanted=target.mtp,
        min_accept_length=run.spec.serving.mtp.min_accept_length,
    )


async def canaries(run: Session, fleet: Fleet) -> None:
    """Does thinking arrive in its field and close, and does MTP really speculate?"""
    spec = run.spec
    judge(run, await thinking_canary(fleet.servers, run.target, spec.sampling, spec.serving))
    judge(run, await mtp_gate(fleet, spec.serving, spec.target))


async def power_hard_rules(run: Session, rig: Rig) -> None:
    """Is anything hung, throttled or plainly off, before any baseline is known?"""
    await judged(run, hard_rules(rig))


@dataclass(frozen=True, slots=True)
class Work:
    """The request pool and who watches it. `began_s` is monotonic."""

    pool: Engine
    watched: "Watched"
    live: LiveWatch | None
    began_s: float

    @property
    def made(self) -> Made:
        """What this invocation generated so far."""
        answers, tokens = self.pool.made()
        return Made(answers, tokens, time.monotonic() - self.began_s)


@contextlib.asynccontextmanager
async def engine(run: Session, fleet: Fleet, rig: Rig, prompts: Prompts) -> AsyncIterator[Work]:
    """The request pool, with everything that watches it. On the way out, finished answers are in the journal."""
    spec = run.spec
    pool = Engine(
        run.paths,
        run.target,
        spec.sampling,
        spec.generation,
        fleet.servers,
        limits=spec.calibration.start,
        prompts_path=prompts.path,
    )
    await asyncio.to_thread(pool.start)
    fleet.subscribe(pool)
    progress_path = run.paths.run_dir / "progress.jsonl"
    watched = Watched(pool, rig, spec.sampling.max_tokens, run.paths.forecast, seconds_before(progress_path))
    live = live_power(run, rig, fleet)
    work = Work(pool, watched, live, time.monotonic())
    try:
        with contextlib.ExitStack() as stack:
            reporter = Reporter(progress_path, watched.read)
            stack.enter_context(ui.LiveProgress("progress", reporter.line))
            stack.enter_context(reporter)  # ends first: the card's last update then has the last reading
            if live is not None:
                stack.enter_context(live)
            yield work
            close_forecast(run, work)
    finally:
        await asyncio.shield(pool.stop("the run ends"))


def close_forecast(run: Session, work: Work) -> None:
    """What generation took in the end, beside what was forecast."""
    end, made = work.watched.read(), work.made
    energy_kwh = {} if work.live is None else {"energy_kwh": work.live.rig.sampler.energy_kwh}
    run.note(generation={**asdict(end), **asdict(made), **energy_kwh})
    record(run.paths.forecast, [], actual_s=end.elapsed_s, actual_tokens=end.output_tokens)


def live_power(run: Session, rig: Rig, fleet: Fleet) -> LiveWatch | None:
    """The power verdicts on a sliding window during generation; changes become events and marks in the report."""
    if not rig.can_judge:
        return None
    marks: list[dict[str, Any]] = []

    def changed(report: GateReport) -> None:
        marks.append(
            {"time_s": time.time(), "verdict": report.verdict, "level": report.level, "summary": report.summary}
        )
        run.note(power_verdicts=marks)
        ui.event("regen.power", {"verdict": report.verdict, "level": report.level.value, "summary": report.summary})

    return LiveWatch(rig, lambda: run.facts.get("limits", {}), on_change=changed, on_hung=fleet.accuse)


class Watched:
    """Progress with what only the flow can add: watts from the sampler, the time that earlier invocations of this run
    spent, and an ETA once calibration gave rates.
    """

    def __init__(self, pool: Engine, rig: Rig, max_tokens: int, path: Path, earlier_s: float = 0.0) -> None:
        self.outlook: Outlook | None = None
        self._pool, self._rig, self._max_tokens, self._path = pool, rig, max_tokens, path
        self._began_s, self._earlier_s = time.time(), earlier_s

    def plain(self) -> Progress:
        """The pool's progress; `elapsed_s` counts every invocation of the run, as deadlines and costs do."""
        progress = self._pool.progress()
        return replace(progress, elapsed_s=progress.elapsed_s + self._earlier_s)

    def expect(self, rates: Rates) -> None:
        """Estimate the end from now on."""
        self.outlook = Outlook(rates, self._max_tokens, self._path)

    def read(self) -> Progress:
        """One reading; called from the reporter's thread every few seconds."""
        progress = self.plain()
        power_w = self._rig.sampler.mean_power_w(max(self._began_s, time.time() - POWER_WINDOW_S))
        j_per_token = power_w / progress.tok_s if power_w is not None and progress.tok_s > 0 else None
        if self.outlook is not None:
            self.outlook.update(progress, *self._pool.lengths())
        eta_s = self.outlook.eta if self.outlook is not None else None
        return replace(progress, power_w=power_w, j_per_token=j_per_token, eta_s=eta_s)


def pending(progress: Progress) -> int:
    """Prompts without an answer or a terminal failure."""
    return progress.total - progress.done - progress.failed


def watts(rig: Rig, server: str, seconds: float) -> float | None:
    """Mean watts of the GPUs behind `server` over its last seconds; None without sensors."""
    own = {uuid for s in rig.servers if s.name == server for uuid in rig.gpus(s)}
    found = [summarize(read) for uuid, read in by_gpu(rig.sampler.window(seconds)).items() if uuid in own]
    means = [stats.mean_w for stats in found if stats is not None]
    return sum(means) if means else None


def by_name(rig: Rig, name: str) -> Server:
    """The server called `name`."""
    return next(server for server in rig.servers if server.name == name)


async def calibration(run: Session, rig: Rig, work: Work) -> CalibrationResult:
    """How many requests in flight give the most tokens? The answers made while searching are kept."""
    key = calibration_key(
        sku=sku_of(rig.infos),
        model=rig.model_digest,
        identity=run.digest,
        servers=[[server.engine, server.version, dict(server.arguments)] for server in rig.servers],
    )
    capacities = {server.name: server.max_running_requests for server in rig.servers}
    found = await calibrate_servers(
        work.pool,
        run.spec.calibration,
        key,
        run.paths.baselines,
        capacities=capacities,
        pending=lambda: pending(work.pool.progress()),
        watts=lambda server, seconds: watts(rig, server, seconds),
        servers=rig.servers,
    )
    if work.live is not None:
        for name, windows in by_server(found).items():
            chosen = [w for w in windows if w.concurrency == found.limits[name]]
            if expected := expected_from_windows(chosen, len(rig.gpus(by_name(rig, name)))):
                work.live.expected[name] = expected
    write_json(run.paths.calibration, as_dict(found))
    run.note(limits=dict(found.limits), calibration_key=key)
    return found


async def forecast_against_budget(run: Session, rig: Rig, work: Work, found: CalibrationResult) -> None:
    """When will it end and what will it cost; may the run go on?"""
    if run.spec.budget.deadline_h is not None or run.spec.budget.max_cost is not None:
        await some_finished(work.pool)
    progress = work.watched.plain()
    rates = rates_from(found, run.spec.budget, len(rig.infos), progress.tok_s)
    work.watched.expect(rates)
    report = await forecast_gate(
        progress, work.pool.lengths(), rates, run.spec.sampling.max_tokens, run.spec.budget, run.paths.forecast
    )
    judge(run, await approved(report, run.spec.budget))


async def some_finished(pool: Engine) -> None:
    """Until answers have ended here. A cached calibration makes none, and a forecast of nothing would pass the budget.

    Ends too when nothing is left, when the pool failed (its chunks raise why), and when it stands still: few small
    chunks may wait for what comes after this gate. Generation goes on meanwhile, so that waiting costs nothing, however
    long the first answers are.
    """
    moved_s = time.monotonic()
    while not pool.failed and pending(progress := pool.progress()):
        ended = len(pool.lengths()[0])
        if progress.in_flight:
            moved_s = time.monotonic()
        if ended >= FEWEST_ENDED or time.monotonic() - moved_s > (STILL_S if ended else DRAIN_S):
            return
        await asyncio.sleep(0.2)


async def power_against_baseline(run: Session, rig: Rig, work: Work, found: CalibrationResult) -> None:
    """At the chosen load: as fast as when it was known good, and do the watts explain it?

    The fixed probe must have the servers for itself: dispatch pauses and what is in flight is awaited. Without power
    to read there is nothing to compare, so nothing waits.
    """
    if rig.can_judge:
        work.pool.pause()
        await drained(work.pool)
    try:
        passed = run.facts.get("gates", {}).get("power_hard_rules", {}).get("level") != Level.CRITICAL
        known = Baselines(run.paths.baselines, run.store)
        await judged(run, baseline_gate(rig, found.limits, known, hard_rules_passed=passed))
    finally:
        work.pool.resume()


async def drained(pool: Engine) -> None:
    """Until nothing is in flight, or DRAIN_S passed: one very long answer must not hold up a gate for ever."""
    deadline_s = time.monotonic() + DRAIN_S
    while not pool.failed and pool.progress().in_flight and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
