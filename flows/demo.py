"""The whole job on one CPU-only machine: a real Prefect server, a real S3 server, a real small model, one data set.

Everything lives in one folder: `prefect/` (database and UI of every run so far), `store/` (the S3 server's data),
`demo/` (runs and journals) and `published/` (the data set as a trainer would fetch it, read back from the store).
The flow runs in this process; the servers run under supervisors that end them when this process is gone.
"""

import asyncio
import contextlib
import errno
import sysconfig
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.demo_published import read_back
from flows.demo_screen import progress_bar, summary_table
from flows.demo_services import (
    BUCKET,
    QUIET_AWS,
    DemoOptions,
    Services,
    check_prompts,
    environment,
    exclusive,
    flow_environment,
    open_services,
    prepare_out,
    terminate_as_interrupt,
)
from flows.local_prefect import LocalPrefect, kept_pid
from flows.spec import RegenSpec, load_job
from tasks.errors import SpecError, StorageError
from tasks.provisioning.embedded import model_path
from tasks.provisioning.local_store import LocalStore

TAG = "regen-demo"
LEASE_S = 60
"""Seconds after which a killed demo's claim on the data set ends, if nobody proves earlier that it is gone."""

COUNTS = ("rows", "kept", "rejected", "duplicates", "completed", "done", "failed", "output_tokens", "tok_s")
RESULT = ("run_id", "run_dir", *COUNTS)
"""What the last line takes from the flow's summary."""


def job_path() -> Path:
    """deployments/demo.yaml of the clone, or the copy inside an installed package. Raises SpecError."""
    here = Path(__file__).resolve().parent
    installed = Path(sysconfig.get_path("data")) / "share" / "drafter-regen" / "demo.yaml"
    for path in (here.parent / "deployments" / "demo.yaml", installed):
        if path.is_file():
            return path
    raise SpecError(f"the demo's job file is not in {here}; install the package again, or use a clone")


def build_spec(options: DemoOptions, store: LocalStore) -> RegenSpec:
    """deployments/demo.yaml with this run's source and places."""
    job = load_job(job_path())
    source: dict[str, Any] = {"limit": options.limit}
    if options.prompts is not None:
        local = "://" not in options.prompts
        source["paths"] = (str(Path(options.prompts).resolve()) if local else options.prompts,)
    publish = {
        "work_dir": str(options.out),
        "store": f"s3://{BUCKET}/{job.publish.dataset}",
        "endpoint_url": store.endpoint_url,
        "region": store.region,
        "lease_s": LEASE_S,
    }
    return job.model_copy(
        update={
            "source": job.source.model_copy(update=source),
            "publish": job.publish.model_copy(update=publish),
        }
    )


def run_demo(options: DemoOptions, services: Services, spec: RegenSpec) -> dict[str, Any]:
    """Run the flow in this process and return its summary. SIGTERM stops it as Ctrl-C does."""
    with environment(flow_environment(services), without=QUIET_AWS), terminate_as_interrupt():
        try:
            return asyncio.run(_run_flow(spec, services.prefect))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StorageError(
                f"disk full while writing {error.filename or options.out}; free space, run again"
            ) from error


async def _run_flow(spec: RegenSpec, server: LocalPrefect) -> dict[str, Any]:
    from prefect import tags

    from flows.demo_records import close_lost_runs, wait_for_records
    from flows.regen import regen

    if server.home is not None:
        await close_lost_runs(TAG)
    groups = {name: getattr(spec, name) for name in RegenSpec.model_fields}
    with tags(TAG):
        summary: dict[str, Any] = await regen(**groups)
    await wait_for_records(TAG)
    return summary


def demo(options: DemoOptions, out: Console, status: Console) -> dict[str, Any]:
    """Everything: check, start the servers, run, read back, tell. Returns the last line's object."""
    check_prompts(options.prompts)
    model_path()
    prepare_out(options.out)
    with exclusive(options.out), contextlib.ExitStack() as stack:
        with status.status("starting the Prefect server and the S3 server"):
            services = stack.enter_context(open_services(options))
        out.print(f"Prefect UI: {services.prefect.ui_url}/runs", highlight=False, soft_wrap=True)
        spec = build_spec(options, services.store)
        with progress_bar(status):
            summary = run_demo(options, services, spec)
        published = read_back(spec, services.store, options.out / "published")
    result = {**{name: summary[name] for name in RESULT}, **published, **_places(options, services, summary)}
    out.print(summary_table(result))
    return result


def _places(options: DemoOptions, services: Services, summary: dict[str, Any]) -> dict[str, Any]:
    report = Path(summary["run_dir"]) / "report.html"
    pid = kept_pid(options.out / "prefect")
    return {
        "out": str(options.out),
        "ui": services.prefect.ui_url,
        **({"ui_pid": pid} if pid else {}),
        **({"report": str(report)} if report.exists() else {}),
    }
