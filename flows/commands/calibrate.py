"""`regen calibrate`: how many requests in flight give the most tokens? Running servers, no Prefect."""

from typing import Any

import click


@click.command(name="calibrate")
@click.option("--url", "urls", multiple=True, required=True, help="Base URL of a running server, or dns://name:port.")
@click.option("--prompts", multiple=True, required=True, help="File, folder or s3:// URL with prompts of the real job.")
@click.option("--target", required=True, help="Model directory or id: tokenizer and chat template.")
@click.option("--out", default="out/calibrate", show_default=True, help="Folder for answers, windows and the plot.")
@click.option("--max-tokens", type=click.IntRange(1), default=32_768, show_default=True, help="Output limit.")
@click.option("--thinking/--no-thinking", default=True, show_default=True, help="Ask for thinking.")
@click.option("--temperature", type=click.FloatRange(0), help="Default: the target's generation_config.")
@click.option("--start", type=click.IntRange(1), default=4, show_default=True, help="Requests in flight at first.")
@click.option("--limit", type=click.IntRange(1), default=512, show_default=True, help="Never more in flight.")
@click.option("--window", "window_s", type=float, default=20.0, show_default=True, help="Seconds a level.")
@click.option("--cache/--no-cache", default=False, show_default=True, help="Take a kept result of the same key.")
@click.option("--deadline-h", type=float, help="Held against the forecast for all prompts.")
@click.option("--price-per-gpu-hour", type=float, help="With --gpus, for the forecast's cost.")
@click.option("--max-cost", type=float, help="Held against the forecast's cost.")
@click.option("--gpus", type=click.IntRange(0), default=0, help="GPUs behind the servers, for the cost.")
@click.option("--api-key-env", default="REGEN_API_KEY", show_default=True, help="Variable that holds the API key.")
def command(**options: Any) -> dict[str, Any]:
    """Find the best number of requests in flight for running servers, on prompts of the real job.

    Answers made while measuring are kept under --out. Exit status: 0 measured, 3 over --deadline-h or --max-cost, 4 no
    server could be measured. The last line of stdout is one JSON object: limits, tok_s, forecast, files.

    Example: regen calibrate --url http://localhost:30000 --target models/qwen3.6-27b --prompts prompts.jsonl
    """
    import asyncio

    from flows.calibrate_plain import Options, calibrate_plainly

    return asyncio.run(calibrate_plainly(Options(**options)))
