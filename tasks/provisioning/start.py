"""Start one server: wait with progress, recognise a failure, turn the ladder's knob, try again; every try is
recorded."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.client.capabilities import detect
from tasks.errors import ServerError
from tasks.provisioning.arguments import StartConfig
from tasks.provisioning.ladder import Limits, advice, turn
from tasks.provisioning.launcher import CommandLine, Launch, Running, free_port
from tasks.provisioning.launcher import start as launch_process
from tasks.provisioning.reaper import state_path
from tasks.provisioning.startup import Diagnosis, Failure, StartFacts, diagnose, milestone, read_facts
from tasks.provisioning.wire import call
from tasks.records import Server

POLL_S = 0.5
HEALTH_TIMEOUT_S = 5.0
"""SGLang's /health generates a token: about 1 s when sound, 20 s to say 503 when not, so a longer wait tells nothing
more."""
WARM_UP_S = 600.0
"""The first request with a temperature above 0 waited 109 s on an H200 while FlashInfer compiled its kernels."""
PORT_WAIT_S = 5.0
LOG_TAIL_BYTES = 4 << 20

KEPT_ARGUMENTS = (
    "attention_backend",
    "chunked_prefill_size",
    "context_length",
    "disable_radix_cache",
    "enable_hierarchical_cache",
    "kv_cache_dtype",
    "load_format",
    "mamba_radix_cache_strategy",
    "mamba_scheduler_strategy",
    "mamba_ssm_dtype",
    "max_running_requests",
    "max_total_num_tokens",
    "mem_fraction_static",
    "quantization",
    "reasoning_parser",
    "sampling_backend",
    "speculative_algorithm",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "tool_call_parser",
    "tp_size",
    "version",
)
"""Of /server_info: what a baseline's key, the MTP proof and the manifest want. Never the whole: it holds the API
key."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one server of the fleet is made from a configuration. `config` None: an engine without knobs."""

    name: str
    command: Callable[[StartConfig | None, int], CommandLine]
    config: StartConfig | None
    model: str
    api_key: str = field(default="", repr=False)
    gpu_uuids: tuple[str, ...] = ()
    lock_fds: tuple[int, ...] = ()
    limits: Limits = field(default_factory=Limits)
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """Patience of one start."""

    timeout_s: float
    attempts: int


@dataclass(slots=True)
class Started:
    """A server that answers, with the configuration that worked."""

    server: Server
    running: Running
    config: StartConfig | None
    facts: StartFacts
    changes_data: tuple[str, ...] = ()


class Starter:
    """Starts servers of one run. `records` gets every attempt with its reason; `cancel` ends a wait within seconds."""

    def __init__(self, run_id: str, logs: Path, budget: Budget, say: Say, cancel: threading.Event) -> None:
        self.run_id, self.logs, self.budget, self.say, self.cancel = run_id, logs, budget, say, cancel
        self.records: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    def start(self, recipe: Recipe, port: int | None = None, reason: str = "first start") -> Started:
        """Try until it answers or the ladder ends; a given `port` is kept, since clients know it.

        Raises ServerError with the evidence, the log and what to do.
        """
        config, tried, changes = recipe.config, [], list[str]()
        known, port = port, port or free_port()
        for attempt in range(1, self.budget.attempts + 1):
            outcome = self._attempt(recipe, config, port, attempt, reason)
            if isinstance(outcome, Started):
                return replace_changes(outcome, changes)
            diagnosis, log_path = outcome
            if config is None:
                raise _given_up(recipe.name, diagnosis, attempt, log_path)
            tried.append(config)
            step = turn(config, diagnosis, recipe.limits, tuple(tried))
            if step is None or attempt == self.budget.attempts:
                raise _given_up(recipe.name, diagnosis, attempt, log_path)
            config, reason = step.config, f"{diagnosis.failure.value}: {step.reason}"
            changes += step.changes_data
            if step.new_port and known is None:
                port = free_port()
            elif step.new_port:
                self.cancel.wait(PORT_WAIT_S)
            self.say(f"{recipe.name}: {reason}")
        raise AssertionError("unreachable: attempts is at least 1")

    def _attempt(
        self, recipe: Recipe, config: StartConfig | None, port: int, attempt: int, reason: str
    ) -> Started | tuple[Diagnosis, Path]:
        line = recipe.command(config, port)
        log_path = self._log_path(recipe.name)
        launch = Launch(
            recipe.name,
            line,
            port,
            log_path,
            state_path(self.run_id, recipe.name),
            self.run_id,
            recipe.gpu_uuids,
            lock_fds=recipe.lock_fds,
        )
        record: dict[str, Any] = {
            "server": recipe.name,
            "attempt": attempt,
            "reason": reason,
            "command": launch.shown_command(),
            "config": config.as_dict() if config else None,
            "log": log_path.name,
            "gpus": list(recipe.gpu_uuids),
        }
        self.records.append(record)
        began = time.monotonic()
        running = launch_process(launch)
        try:
            diagnosis = self._wait(recipe, running, line, port)
            text = read_log(log_path)
            facts = read_facts(text)
            record |= {"seconds": round(time.monotonic() - began, 1), "facts": facts.as_dict()}
            if diagnosis is None:
                record["outcome"] = "ready"
                server = describe(recipe, port, config, facts, str(log_path))
                record["warnings"] = warnings_of(config, server)
                return Started(server, running, config, facts)
        except BaseException:
            record["outcome"] = "interrupted"
            running.stop()
            raise
        running.stop()
        record |= {"outcome": "failed", "failure": diagnosis.failure.value, "evidence": diagnosis.evidence}
        return diagnosis, log_path

    def _wait(self, recipe: Recipe, running: Running, line: CommandLine, port: int) -> Diagnosis | None:
        """None once it answers a request; else why it will not."""
        base, seen = f"http://127.0.0.1:{port}", ""
        deadline = time.monotonic() + self.budget.timeout_s
        log_path = running.launch.log_path
        while True:
            if self.cancel.is_set():
                raise ServerError(f"the start of {recipe.name} was cancelled", str(log_path))
            ended = running.poll()
            if ended is not None:
                return diagnose(read_log(log_path), ended.code)
            now = milestone(read_log(log_path))
            if now != seen:
                seen = now
                self.say(f"{recipe.name}: {now}")
            if call(base + line.health_path, api_key=recipe.api_key, timeout_s=HEALTH_TIMEOUT_S).ok:
                return self._warm_up(recipe, running, base)
            if time.monotonic() > deadline:
                return diagnose(read_log(log_path), None)
            time.sleep(POLL_S)

    def _warm_up(self, recipe: Recipe, running: Running, base: str) -> Diagnosis | None:
        """One sampled request, so that kernels are compiled before anybody watches the clock."""
        body = {
            "model": recipe.model,
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 8,
            "temperature": 1.0,
            "top_p": 0.95,
            "top_k": 20,
        }
        self.say(f"{recipe.name}: warm-up request")
        answer = call(base + "/v1/chat/completions", body, api_key=recipe.api_key, timeout_s=WARM_UP_S)
        if answer.ok:
            self.say(f"{recipe.name}: ready")
            return None
        time.sleep(1.0)  # a process that died in the request needs a moment to be seen as dead
        ended = running.poll()
        log = read_log(running.launch.log_path)
        found = diagnose(log, ended.code if ended else None)
        said = f"the warm-up request got {answer.status or answer.error}: {str(answer.body)[:200]}"
        if found.failure in (Failure.TIMEOUT, Failure.UNKNOWN):
            return Diagnosis(Failure.WARM_UP, said)
        return found

    def _log_path(self, name: str) -> Path:
        with self._lock:
            number = self._numbers.get(name, 0) + 1
            while (path := self.logs / f"{name}-{number:02d}.log").exists():
                number += 1
            self._numbers[name] = number
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def replace_changes(started: Started, changes: list[str]) -> Started:
    """Note which identity fields the ladder changed."""
    started.changes_data = tuple(changes)
    return started


def describe(recipe: Recipe, port: int, config: StartConfig | None, facts: StartFacts, log_path: str) -> Server:
    """The record of a running server, from what it says about itself."""
    base = f"http://127.0.0.1:{port}"
    engine, version, capabilities, info = detect(base, recipe.api_key, recipe.model, HEALTH_TIMEOUT_S)
    server = Server(
        name=recipe.name,
        base_url=base,
        model=recipe.model,
        engine=engine,
        version=version,
        api_key=recipe.api_key,
        capabilities=capabilities,
        max_running_requests=effective_running(info) or facts.max_running_requests,
        context_tokens=min(filter(None, (facts.context_tokens, facts.kv_tokens)), default=None),
        gpu_uuids=recipe.gpu_uuids,
        log_path=log_path,
        arguments=kept_arguments(info),
        simulated_acceptance=recipe.simulated,
    )
    if engine == "llama.cpp":
        slots, context = info.get("total_slots"), (info.get("default_generation_settings") or {}).get("n_ctx")
        server = replace(server, max_running_requests=slots, context_tokens=context)
    return server


def effective_running(info: Mapping[str, Any]) -> int | None:
    """The true limit: /server_info's own max_running_requests shows what was asked for, not what fits."""
    states = info.get("internal_states") or [{}]
    value = states[0].get("effective_max_running_requests_per_dp") if isinstance(states[0], Mapping) else None
    return int(value) if value else None


def kept_arguments(info: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments worth keeping; older servers nest them in `server_args`."""
    source = info.get("server_args") if isinstance(info.get("server_args"), Mapping) else info
    assert source is not None
    return {name: source[name] for name in KEPT_ARGUMENTS if name in source}


def warnings_of(config: StartConfig | None, server: Server) -> list[str]:
    """What a running server silently made less of."""
    if config is None or server.max_running_requests is None or server.max_running_requests >= config.max_running:
        return []
    return [
        f"{config.max_running} running requests were asked for, the server allows {server.max_running_requests}: "
        "the state cache capped them"
    ]


def read_log(path: Path) -> str:
    """The log so far (its last 4 MB)."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _given_up(name: str, diagnosis: Diagnosis, attempts: int, log_path: Path) -> ServerError:
    return ServerError(
        f"{name} did not start after {attempts} attempt(s): {diagnosis.failure.value}: {diagnosis.evidence}; "
        f"{advice(diagnosis.failure)}. Log: {log_path}",
        str(log_path),
    )
