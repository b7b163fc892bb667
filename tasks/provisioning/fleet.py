"""Open the servers of one run, whichever mode they come from; `Fleet` (keeper.py) then looks after them.

Order for our own servers: leftovers of dead runs, locks on the GPUs, a memory plan, then the first server with the
ladder and the others beside each other with the configuration that worked.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from tasks.client.capabilities import detect
from tasks.errors import ServerError
from tasks.provisioning.arguments import flag_value
from tasks.provisioning.engines import refuse_simulation
from tasks.provisioning.gpus import GpuReader, choose, groups, read_nvidia_smi
from tasks.provisioning.keeper import Fleet, Member
from tasks.provisioning.ladder import Limits
from tasks.provisioning.launcher import CommandLine
from tasks.provisioning.parity import take_reference
from tasks.provisioning.reaper import find_leftovers, lock_gpus
from tasks.provisioning.settings import ServingSettings
from tasks.provisioning.sglang import Blueprint, draw
from tasks.provisioning.start import Budget, Recipe, Started, Starter, effective_running, kept_arguments
from tasks.provisioning.supervision import UNREACHABLE_S, HealthMonitor
from tasks.provisioning.together import Losses, Placed, start_together
from tasks.records import GpuFacts, Server
from tasks.runs import RunPaths, read_json
from tasks.settings import TargetSettings

__all__ = ["Fleet", "open_fleet", "open_fleet_async"]

EMBEDDED_SLOTS = 4
EMBEDDED_CONTEXT = 8192
EMBEDDED_PROMPT = 2048
LOCK_WAIT_S = 30.0
"""A run that was just killed needs a moment until its supervisors have ended its servers."""
CANCEL_S = 15.0
"""Prefect sends SIGKILL 30 s after a cancel; the supervisors would end the servers then too."""
CHANGES = "serving_changes"
"""Key of record.json: what the ladder changed of the data; a resumed run starts its servers the same way."""


@dataclass(frozen=True, slots=True)
class _Opening:
    serving: ServingSettings
    target: TargetSettings
    paths: RunPaths
    max_tokens: int
    thinking: bool
    say: Callable[[str], None]
    read_gpus: GpuReader
    simulate_accept_length: float | None
    cancel: threading.Event


def open_fleet(
    serving: ServingSettings,
    target: TargetSettings,
    paths: RunPaths,
    *,
    max_tokens: int,
    thinking: bool = True,
    progress: Callable[[str], None] | None = None,
    gpus: GpuReader | Sequence[GpuFacts] | None = None,
    simulate_accept_length: float | None = None,
    cancel: threading.Event | None = None,
) -> Fleet:
    """Every server answers and is watched when this returns. Blocks for minutes: call it in a thread.

    `gpus`: what the sensors read (a reader is asked again after a crash), else `nvidia-smi` is. `max_tokens`: the
    longest answer, which one request's context must hold. `cancel` set from elsewhere ends the start.
    `simulate_accept_length` is for GPU tests only and marks every server as simulated.
    Raises ServerError where a server cannot be had, SpecError or TargetError where the settings or the model do not
    fit.
    """
    refuse_simulation((os.environ, serving.env), simulate_accept_length)
    reader = gpus if callable(gpus) else (lambda: gpus) if gpus else read_nvidia_smi
    opening = _Opening(
        serving,
        target,
        paths,
        max_tokens,
        thinking,
        progress or (lambda _: None),
        reader,
        simulate_accept_length,
        cancel or threading.Event(),
    )
    if serving.mode == "attach":
        return _watched(_attach(opening))
    leftovers = [str(leftover) for leftover in find_leftovers()]
    for line in leftovers:
        opening.say(f"left over on this node: {line}")
    starter = _starter(opening)
    fleet = _embedded(opening, starter) if serving.mode == "embedded" else _sglang(opening, starter)
    fleet.leftovers = leftovers
    fleet.note = lambda ended: paths.note(server_starts=ended.records, server_events=ended.events)
    paths.note(server_starts=starter.records, leftovers=leftovers)
    return _watched(fleet)


async def open_fleet_async(serving: ServingSettings, target: TargetSettings, paths: RunPaths, **options: Any) -> Fleet:
    """`open_fleet` in a thread. When the caller is cancelled a start under way is ended before this returns."""
    cancel = threading.Event()
    opening = asyncio.ensure_future(asyncio.to_thread(open_fleet, serving, target, paths, cancel=cancel, **options))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        cancel.set()
        with contextlib.suppress(ServerError, TimeoutError):
            (await asyncio.wait_for(opening, CANCEL_S)).close()
        raise


def _watched(fleet: Fleet) -> Fleet:
    fleet.watch()
    return fleet


def _starter(opening: _Opening) -> Starter:
    budget = Budget(opening.serving.start_timeout_s, opening.serving.start_attempts)
    return Starter(opening.paths.run_id, opening.paths.logs, budget, opening.say, opening.cancel)


def _attach(opening: _Opening) -> Fleet:
    """Servers that somebody else runs: found, described and watched, never started or ended."""
    serving = opening.serving
    key = os.environ.get(serving.api_key_env, "")
    members = []
    for number, url in enumerate(resolve(serving.urls)):
        engine, version, capabilities, info = detect(url, key, opening.target.model)
        model = served_model(url, key) or opening.target.model
        server = Server(
            name=f"server-{number}",
            base_url=url,
            model=model,
            engine=engine,
            version=version,
            api_key=key,
            capabilities=capabilities,
            max_running_requests=effective_running(info) or serving.slots,
            context_tokens=serving.context_tokens,
            arguments=kept_arguments(info),
        )
        opening.say(f"{server.name}: {url} is {engine} {version}".rstrip())
        members.append(Member(server, monitor=monitor_of(server, serving, ours=False)))
    return Fleet(members, serving)


def resolve(urls: Sequence[str]) -> list[str]:
    """Base URLs without `/v1`; `dns://name:port` becomes one for each address that the name has.

    Raises ServerError when a name does not resolve.
    """
    found: list[str] = []
    for url in urls:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("dns", "dns+https"):
            found.append(parts.geturl().rstrip("/").removesuffix("/v1"))
            continue
        try:
            answers = socket.getaddrinfo(parts.hostname, parts.port or 30_000, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ServerError(
                f"{url} does not resolve ({error}): is the service's name right, does it have pods?"
            ) from error
        scheme = "https" if parts.scheme == "dns+https" else "http"
        for address, port in sorted({(str(answer[4][0]), int(answer[4][1])) for answer in answers}):
            host = f"[{address}]" if ":" in address else address
            found.append(f"{scheme}://{host}:{port}")
    if not found:
        raise ServerError("serving.urls is empty: name at least one server to attach to")
    return list(dict.fromkeys(found))


def served_model(url: str, api_key: str) -> str | None:
    """The first model that the server lists."""
    from tasks.provisioning.wire import call

    data = call(f"{url}/v1/models", api_key=api_key).object().get("data")
    return (
        str(data[0]["id"])
        if isinstance(data, list) and data and isinstance(data[0], dict) and "id" in data[0]
        else None
    )


def _embedded(opening: _Opening, starter: Starter) -> Fleet:
    """The CPU engine, under the same supervisor as every other server."""
    from tasks.provisioning import embedded

    serving = opening.serving
    key = secrets.token_urlsafe(24)
    slots = serving.slots or EMBEDDED_SLOTS
    context = serving.context_tokens or min(EMBEDDED_CONTEXT, opening.max_tokens + EMBEDDED_PROMPT)

    def command(_: object, port: int) -> CommandLine:
        made = embedded.engine_command(port, slots=slots, context_tokens=context, api_key=key)
        return CommandLine(made.argv, {**made.env, **serving.env}, secrets=(key,))

    recipe = Recipe("server-0", command, None, opening.target.model, api_key=key)
    started = starter.start(recipe)
    return Fleet([_member(started, recipe, serving)], serving, starter)


def _sglang(opening: _Opening, starter: Starter) -> Fleet:
    """One server a group of GPUs, each bound to its own GPUs, port, log and key."""
    serving, paths = opening.serving, opening.paths
    chosen = choose(list(opening.read_gpus()), serving.gpus)
    locks = lock_gpus([gpu.uuid for gpu in chosen], paths.run_id, LOCK_WAIT_S)
    try:
        # Read again: what a dying run held is free now.
        chosen = choose(list(opening.read_gpus()), serving.gpus)
        changes = read_json(paths.record).get(CHANGES, {}) if paths.record.exists() else {}
        drawn = draw(serving, opening.target, chosen, opening.max_tokens, changes, opening.say)
        paths.note(memory_plan=drawn.plan.as_dict(), sglang_version=drawn.version)
        limits = Limits(serving.allow_bf16_state, serving.allow_fp8, data_begun(paths), drawn.fixed_flags)
        placed = groups(chosen, drawn.config.tp)
        recipes = [_recipe(opening, drawn, f"server-{i}", group, limits, locks.fds) for i, group in enumerate(placed)]
        reference = take_reference(starter, recipes[0], opening.say) if serving.mtp.parity_canary else None
        losses = Losses(len(recipes), serving.min_servers)
        started = start_together(starter, list(zip(recipes, placed, strict=True)), losses)
    except BaseException:
        paths.note(server_starts=starter.records)
        locks.release()
        raise
    members = [_member(one, recipe, serving, group) for one, recipe, group in started]
    fleet = Fleet(members, serving, starter, locks, opening.read_gpus)
    fleet.events += losses.events
    fleet.changes_data = {**changes, **_changed(started)}
    if fleet.changes_data:
        paths.note(**{CHANGES: fleet.changes_data})
    if reference is not None:
        fleet.parity_reference, fleet.plain_tok_s = dict(reference.answers), reference.tok_s
    return fleet


def _recipe(
    opening: _Opening, drawn: Blueprint, name: str, group: tuple[GpuFacts, ...], limits: Limits, locks: tuple[int, ...]
) -> Recipe:
    key = flag_value(opening.serving.extra_args, "--api-key") or secrets.token_urlsafe(24)
    uuids = tuple(gpu.uuid for gpu in group)
    container = f"regen-{opening.paths.run_id}-{name}"
    return Recipe(
        name=name,
        command=drawn.commander(key, uuids, container, opening.simulate_accept_length),
        config=drawn.config,
        model=opening.target.model,
        api_key=key,
        gpu_uuids=uuids,
        lock_fds=locks,
        limits=limits,
        simulated=opening.simulate_accept_length is not None,
    )


def monitor_of(server: Server, serving: ServingSettings, ours: bool) -> HealthMonitor:
    """SGLang answers in 10 ms whatever it does. Other engines may answer only between two batches; and the end of a
    process of ours is seen anyway, so that its silence may be long."""
    hang, sglang = serving.hang_timeout_s, server.engine == "sglang"
    silence = UNREACHABLE_S if sglang else hang if ours else 3 * UNREACHABLE_S
    return HealthMonitor(hang, silence, counters=sglang)


def _member(started: Started, recipe: Recipe, serving: ServingSettings, group: tuple[GpuFacts, ...] = ()) -> Member:
    # From here on there may be answers in the run: a restart must not change what they are answers of.
    limits = replace(recipe.limits, data_begun=True)
    return Member(
        started.server,
        started.running,
        replace(recipe, config=started.config, limits=limits),
        monitor_of(started.server, serving, ours=True),
        {gpu.uuid: gpu.free_bytes for gpu in group},
    )


def _changed(started: Sequence[Placed]) -> dict[str, str]:
    changed: dict[str, str] = {}
    for one, _, _ in started:
        for name in one.changes_data:
            value = one.config.quantization if name.endswith("quantization") else one.config.state_dtype  # type: ignore[union-attr]
            changed[name] = str(value)
    return changed


def data_begun(paths: RunPaths) -> bool:
    """Whether the run has answers already: then nothing that would change the data may change."""
    return paths.chunks.is_dir() and any(path for folder in paths.chunks.iterdir() for path in folder.glob("*"))
