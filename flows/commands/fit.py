"""`regen fit`: plan one server's memory from config.json, without a GPU."""

from pathlib import Path
from typing import Any

import click

from flows.outcome import Outcome
from tasks.provisioning.settings import PROVEN_SGLANG

GIB = 1 << 30
MARKETED_SHARE = 139.13 / 141
"""Free GiB of an idle card for each marketed GB (recorded on an H200); give --available-gib where it is known."""


@click.command()
@click.option("--model-config", "model_config", required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--gpu-gib", type=click.FloatRange(min=1), required=True, help="The card's memory as it is sold (80, 96, 141)."
)
@click.option("--available-gib", type=click.FloatRange(min=1), help="What is free on it, where known.")
@click.option("--sglang", "version", default=PROVEN_SGLANG, show_default=True, help="Whose memory formulas hold.")
@click.option("--mean-tokens", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens a request.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=None, help="Longest prompt and answer that must fit.")
@click.option("--slots", type=click.IntRange(min=1), help="Running requests wanted; default: as many as fit.")
@click.option("--draft-tokens", type=click.IntRange(min=2), default=4, show_default=True, help="With MTP.")
@click.option("--no-mtp", is_flag=True, help="Plan without speculation.")
@click.option("--radix-cache", is_flag=True, help="Plan with the radix cache on.")
@click.option("--state-dtype", type=click.Choice(["float32", "bfloat16"]), help="Recurrent state.")
@click.option("--fp8", is_flag=True, help="Weights in FP8.")
@click.option(
    "--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs for one server, if needed."
)
@click.option(
    "--mem-fraction", type=click.FloatRange(0, 1, min_open=True, max_open=True), help="Fixed memory fraction."
)
@click.option("--json", "as_json", is_flag=True, help="Only the last line of JSON.")
def command(
    model_config: Path,
    gpu_gib: float,
    available_gib: float | None,
    version: str,
    mean_tokens: int,
    max_tokens: int | None,
    slots: int | None,
    draft_tokens: int,
    no_mtp: bool,
    radix_cache: bool,
    state_dtype: str | None,
    fp8: bool,
    gpus: int,
    mem_fraction: float | None,
    as_json: bool,
) -> dict[str, Any]:
    """Plan a server's memory: requests, context and fraction for one GPU. Exit status 3 where nothing fits.

    Example: regen fit --model-config Qwen3.6-27B/config.json --gpu-gib 141
    """
    from tasks.provisioning.model_config import read_model
    from tasks.provisioning.planner import Request, default_plan, smallest_group

    model = read_model(model_config)
    available = int((available_gib or gpu_gib * MARKETED_SHARE) * GIB)
    request = Request(
        version=version,
        draft_tokens=0 if no_mtp or not model.mtp_layers else draft_tokens,
        mean_tokens=mean_tokens,
        need_tokens=max_tokens or 0,
        slots=slots,
        fraction=mem_fraction,
        radix=radix_cache,
        ssm_bytes={"float32": 4, "bfloat16": 2, None: None}[state_dtype],
        fp8=fp8,
    )
    made = smallest_group(model, available, request, gpus)
    total = int(gpu_gib * GIB * 0.9957)  # an H200 sold with 141 has 140.4 GiB
    result = {**made.as_dict(), "sglang_defaults": default_plan(model, total, available, request)}
    if not as_json:
        click.echo(_table(result))
    if not made.fits:
        raise Outcome(result, 3)
    return result


def _table(result: dict[str, Any]) -> str:
    rows = [
        ("available", f"{result['available_gib']} GiB", f"SGLang {result['sglang']}, formulas of {result['formulas']}"),
        ("tensor parallel", str(result["tensor_parallel"]), ""),
    ]
    sizes: dict[str, int] = result["bytes"]
    for name in ("weights", "mtp_head", "states", "draft_intermediates", "kv_cache", "reserve"):
        rows.append((name.replace("_", " "), f"{sizes[name] / GIB:.2f} GiB", ""))
    rows += [
        ("state a request", f"{sizes['state_per_request']:,} B", ""),
        ("KV a token", f"{sizes['kv_per_token']:,} B", "the draft's included"),
        ("a request", f"{result['per_request_bytes'] / GIB:.2f} GiB", "state, draft states and mean tokens"),
        ("running requests", str(result["max_running_requests"]), f"defaults: {_defaults(result['sglang_defaults'])}"),
        ("KV tokens", f"{result['kv_tokens']:,}", ""),
        ("context", f"{result['context_tokens']:,}", ""),
        ("memory fraction", str(result["mem_fraction_static"]), ""),
    ]
    lines = [f"{name:<22}{value:>20}  {note}".rstrip() for name, value, note in rows]
    lines += [f"does not fit: {text}" for text in result["problems"]]
    lines += [f"would fit: {text}" for text in result["knobs"]]
    return "\n".join(lines + [f"note: {text}" for text in result["notes"]])


def _defaults(defaults: dict[str, Any]) -> str:
    return (
        f"{defaults['running_requests']}, {defaults['free_gib']} GiB left free" if defaults["fits"] else defaults["why"]
    )
