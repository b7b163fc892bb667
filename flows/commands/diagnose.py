"""`regen diagnose`: why is the GPU starved? Counters, a short profile, and the hypothesis tree."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tasks.power.diagnosis import Diagnosis
    from tasks.records import Server


@click.command(
    help="Why is the GPU starved? Examine a running server.\n\n"
    "Example: regen diagnose --url http://127.0.0.1:30000 --load 32"
)
@click.option("--url", required=True, help="Base URL of the server.")
@click.option("--api-key-env", default="REGEN_API_KEY", show_default=True, help="Environment variable with the key.")
@click.option("--seconds", default=10.0, show_default=True, type=click.FloatRange(1), help="Seconds of counters.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(1, 500), help="Forward passes to profile.")
@click.option(
    "--load", default=None, type=click.IntRange(0), help="Own requests in flight; default: 8 when it is idle."
)
@click.option("--no-profile", is_flag=True, help="Counters only: nothing disturbs the server.")
@click.option("--mtp/--no-mtp", default=True, show_default=True, help="Whether speculation is wanted.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("out/diagnosis"), show_default=True, help="Folder."
)
def command(
    url: str,
    api_key_env: str,
    seconds: float,
    steps: int,
    load: int | None,
    no_profile: bool,
    mtp: bool,
    out: Path,
) -> dict[str, Any]:
    """Prints a table; the last line holds everything; a table artifact where Prefect is configured."""
    import asyncio

    server = attach(url, os.environ.get(api_key_env, ""))
    found = asyncio.run(_examine(server, seconds, steps, load, None if no_profile else out / "trace", mtp))
    from tasks.power.diagnosis import write_diagnosis

    write_diagnosis(found, out / "diagnosis.json")
    show(found)
    if os.environ.get("PREFECT_API_URL"):
        from tasks.power.task import show_diagnosis

        show_diagnosis(found)
    return {**found.as_dict(), "path": str(out / "diagnosis.json")}


def attach(url: str, api_key: str) -> "Server":
    """The running server as a record. Raises ServerError when nothing answers there."""
    from tasks.client.capabilities import detect
    from tasks.records import Server

    base = url.rstrip("/").removesuffix("/v1")
    engine, version, capabilities, info = detect(base, api_key)
    return Server(
        name=base.split("//")[-1],
        base_url=base,
        model=model_of(info),
        engine=engine,
        version=version,
        api_key=api_key,
        capabilities=capabilities,
        max_running_requests=slots_of(info),
        arguments=info,
    )


def model_of(info: dict[str, Any]) -> str:
    """The name to ask for: SGLang's served name, else the first model that the server lists."""
    named = info.get("served_model_name") or info.get("model_path") or info.get("model_alias")
    listed = (info.get("models") or {}).get("data") or [{}]
    return str(named or listed[0].get("id") or "default")


def slots_of(info: dict[str, Any]) -> int | None:
    """Requests that can really run: SGLang's limit after its memory plan, not the one asked for."""
    states = [state for state in info.get("internal_states") or () if isinstance(state, dict)]
    real = [int(state["effective_max_running_requests_per_dp"]) for state in states
            if state.get("effective_max_running_requests_per_dp")]  # fmt: skip
    asked = info.get("max_running_requests")
    return sum(real) if real else (int(asked) if asked else None)


async def _examine(
    server: "Server", seconds: float, steps: int, load: int | None, folder: Path | None, mtp: bool
) -> "Diagnosis":
    from tasks.power.diagnosis import diagnose
    from tasks.power.nvml import open_nvml
    from tasks.power.rig import Rig
    from tasks.power.sampler import PowerSampler
    from tasks.power.settings import PowerSettings

    nvml = open_nvml()
    try:
        with PowerSampler(None, nvml, 10.0) as sampler:
            rig = Rig([server], sampler, PowerSettings(), mtp_wanted=mtp)
            return await diagnose(rig, server, folder=folder, seconds=seconds, steps=steps, load=load)
    finally:
        if nvml is not None:
            nvml.close()


def show(found: "Diagnosis") -> None:
    """The hypothesis table, and where the GPU's time goes."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{found.server.base_url}: {found.judgement.code.value}: {found.judgement.summary}")
    marks = {"supported": "[red]supported[/]", "refuted": "[green]refuted[/]", "untested": "[yellow]untested[/]"}
    tree = Table(title="Why is the GPU starved?")
    for name in ("", "cause", "evidence", "look at next"):
        tree.add_column(name)
    for row in found.rows():
        tree.add_row(marks[row["status"]], row["cause"], row["evidence"], row["next"])
    console.print(tree)
    if found.profile is None:
        console.print(f"no profile: {found.profile_problem}")
        return
    shares = Table(title=f"GPU time over {found.profile.window_s:.2f} s")
    shares.add_column("work")
    shares.add_column("share", justify="right")
    for work, share in {**found.profile.shares, "gaps": found.profile.gaps}.items():
        shares.add_row(work, f"{share:.1%}")
    console.print(shares)
