"""The same verdicts during generation, on a sliding window, from a thread of its own.

Natural answers are not the probe: tokens per second are compared only with what calibration measured on the same data
(`expected`), and acceptance only with its least value. A verdict is told when it changes and was seen twice in a row; a
hung server is told once, to whoever restarts it. Nothing here stops a run.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tasks.power import rules
from tasks.power.evidence import Evidence, Expected, gpu_evidence, service_evidence
from tasks.power.gate import summed
from tasks.power.rig import Rig
from tasks.power.verdict import Code, Judgement, judge
from tasks.records import GateReport, Level, LoadWindow, ServiceSample

log = logging.getLogger(__name__)

BAND_NATURAL = 0.20
"""Relative band around calibration's own windows: lengths and contexts of natural answers vary."""
KEEP_S = 600.0


def expected_from_windows(windows: Sequence[LoadWindow], gpus: int = 1) -> Expected | None:
    """What calibration measured at the chosen concurrency, as the band for generation; None without tokens."""
    good = [w for w in windows if not w.starved and w.tok_s > 0]
    if not good:
        return None
    last = good[-1]
    return Expected(
        tok_s=last.tok_s,
        power_w=last.power_w / gpus if last.power_w else None,
        tok_s_band=BAND_NATURAL,
        power_band=BAND_NATURAL,
        accept_length=last.accept_length,
    )


class LiveWatch:
    """Watches the fleet of `rig`; use as a context manager.

    `limits` gives the requests in flight wanted, by server name, whenever it is asked. `on_change(report)` is called
    from the watching thread with the fleet's report when a verdict changes, `on_hung(server, reason)` once a hang. Both
    may raise: it is logged, and watching goes on.
    """

    def __init__(
        self,
        rig: Rig,
        limits: Callable[[], Mapping[str, int]],
        *,
        expected: Mapping[str, Expected] | None = None,
        on_change: Callable[[GateReport], None] | None = None,
        on_hung: Callable[[str, str], None] | None = None,
        idle_w: Mapping[str, float] | None = None,
        every_s: float = 5.0,
    ) -> None:
        self.rig, self.limits, self.expected = rig, limits, dict(expected or {})
        self.on_change, self.on_hung, self.idle_w, self.every_s = on_change, on_hung, dict(idle_w or {}), every_s
        self._samples: dict[str, deque[ServiceSample]] = {server.name: deque() for server in rig.servers}
        self._seen: dict[str, list[Code]] = {}
        self._told: dict[str, Code] = {}
        self._hung: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._report: GateReport | None = None

    def __enter__(self) -> "LiveWatch":
        self._thread = threading.Thread(target=self._loop, name="power-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(timeout=15)

    @property
    def report(self) -> GateReport | None:
        """The last report on the fleet; None before the first."""
        return self._report

    def power_w(self) -> float | None:
        """Watts of all GPUs together over the window."""
        return self.rig.sampler.mean_power_w(time.time() - self.rig.settings.live_window_s)

    def _loop(self) -> None:
        while not self._stop.wait(self.every_s):
            try:
                asyncio.run(self._read())
                self.step(time.time())
            except Exception:
                log.exception("the power watch could not judge; it goes on")

    async def _read(self) -> None:
        taken = await asyncio.gather(*(self.rig.read_service(server) for server in self.rig.servers))
        for sample in taken:
            self.observe(replace(sample, time_s=time.time()))

    def observe(self, sample: ServiceSample) -> None:
        """Add one reading of a server's counters (Unix time)."""
        kept = self._samples.setdefault(sample.server, deque())
        kept.append(sample)
        while kept[0].time_s < sample.time_s - KEEP_S:
            kept.popleft()

    def step(self, now_s: float) -> list[Judgement]:
        """Judge every server on the window that ends at `now_s`, and tell what changed."""
        limits = self.limits()
        judgements = [j for server in self.rig.servers if (j := self._judge(server.name, limits, now_s)) is not None]
        if not judgements:
            return []
        self._report = summed("power_live", "monitor", judgements)
        changed = [j for j in judgements if self._changed(j)]
        for judgement in judgements:
            self._tell_hung(judgement)
        if changed and self.on_change is not None:
            try:
                self.on_change(self._report)
            except Exception:
                log.exception("a listener of the power watch failed")
        return judgements

    def _judge(self, name: str, limits: Mapping[str, int], now_s: float) -> Judgement | None:
        server = next(s for s in self.rig.servers if s.name == name)
        every = list(self._samples.get(name, ()))
        start_s = now_s - self.rig.settings.live_window_s
        inside = [s for s in every if s.time_s >= start_s]
        limit = limits.get(name, 0)
        if len(inside) < 2 or limit <= 0:
            return None
        service = service_evidence(inside, arguments=server.arguments)
        whole = service_evidence(every)
        service = replace(service, stalled_s=whole.stalled_s)
        # While nothing moves, the watts of the stall are the evidence, not those of the work before it.
        since_s = max(start_s, now_s - service.stalled_s) if service.stalled_s > rules.STALL_S else start_s
        job = replace(self.rig.job(server, limit), workload="natural")
        steady = (service.running or 0) >= 1
        evidence = Evidence(
            job=job,
            service=service,
            gpus=gpu_evidence(
                self.rig.sampler.since(since_s, now_s), self.rig.infos, self.rig.gpus(server), idle_w=self.idle_w
            ),
            expected=self.expected.get(name) if steady else None,
        )
        return judge(evidence)

    def _changed(self, judgement: Judgement) -> bool:
        """Whether this verdict is new and was seen twice in a row (a hang needs no second look)."""
        seen = [*self._seen.get(judgement.server, []), judgement.code][-2:]
        self._seen[judgement.server] = seen
        sure = judgement.hung or (len(seen) == 2 and seen[0] is seen[1])
        if not sure or self._told.get(judgement.server) is judgement.code:
            return False
        before = self._told.get(judgement.server)
        self._told[judgement.server] = judgement.code
        return before is not None or judgement.level in (Level.WARNING, Level.CRITICAL)

    def _tell_hung(self, judgement: Judgement) -> None:
        if not judgement.hung:
            self._hung.discard(judgement.server)
            return
        if judgement.server in self._hung or self.on_hung is None:
            return
        self._hung.add(judgement.server)
        try:
            self.on_hung(judgement.server, f"{judgement.code.value}: {judgement.summary}")
        except Exception:
            log.exception("the supervisor could not be told of a hung server")
