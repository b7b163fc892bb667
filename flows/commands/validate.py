"""`regen validate`: may I train on this?"""

import tempfile
from pathlib import Path
from typing import Any

import click

from flows.outcome import Outcome

GATE_FAILED = 3


@click.command(name="validate")
@click.argument("sources", nargs=-1, required=True)
@click.option("--target", help="Model directory or Hugging Face id: its tokenizer and chat template judge the masks.")
@click.option("--chat-template", type=click.Path(exists=True, dir_okay=False), help="Instead of that of --target.")
@click.option("--min-content-tokens", type=click.IntRange(0), default=8, show_default=True, help="Floor of a sample.")
@click.option(
    "--max-empty-share", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Below the floor."
)
@click.option("--max-reject-share", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Of all rows.")
@click.option("--gate", type=click.Choice(["enforce", "monitor"]), default="enforce", show_default=True)
@click.option("--prompts", "prompts_only", is_flag=True, help="Judge prompts to regenerate; old responses may be bad.")
@click.option("--report", type=click.Path(dir_okay=False), help="Write the full report as JSON.")
@click.option("--rejected", type=click.Path(dir_okay=False), help="Write every reject and duplicate as Parquet.")
@click.option("--kept", type=click.Path(dir_okay=False), help="Write the rows that passed as Parquet.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Write the histogram of supervised tokens as PNG.")
@click.option("--split", default="train", show_default=True, help="Of hf:// data sets and save_to_disk folders.")
@click.option("--limit", type=click.IntRange(1), help="Read at most this many rows.")
@click.option("--control-tokens", type=click.Choice(["reject", "encode"]), default="reject", show_default=True)
@click.option("--duplicates", type=click.Choice(["auto", "prompt", "row"]), default="auto", show_default=True)
@click.option("--near-duplicates", is_flag=True, help="MinHash over word shingles (needs datasketch).")
@click.option("--decontaminate", multiple=True, help="Benchmark file whose prompts must not be in the set.")
@click.option("--s3-endpoint-url", help="For s3:// sources that are not AWS.")
@click.option("--workers", type=click.IntRange(1), help="Processes or threads; default: one a core, at most 8.")
def command(
    sources: tuple[str, ...],
    target: str | None,
    chat_template: str | None,
    prompts_only: bool,
    report: str | None,
    rejected: str | None,
    kept: str | None,
    plot: str | None,
    **options: Any,
) -> dict[str, Any]:
    """May I train on SOURCES? Judge chat rows or tokenized rows; no GPU and no Prefect server are needed.

    SOURCES are files (JSONL plain, .gz or .zst, JSON, Parquet, Arrow), save_to_disk folders, folders, globs, s3:// URLs
    or hf://org/name. Exit status: 0 passed, 3 the gate failed, 2 the input cannot be read. The last line of stdout is
    one JSON object: rows, kept, rejected, duplicates, reasons, verdict.

    Example: regen validate data/*.parquet --target models/qwen3.6-27b --report report.json --rejected bad.parquet
    """
    from flows.commands.validate_screen import judging, show
    from tasks.runs import write_json
    from tasks.settings import TargetSettings
    from tasks.validation.run import validate
    from tasks.validation.settings import SourceSettings

    if chat_template and not target:
        raise click.UsageError(
            "--chat-template is given without --target, so nothing would be rendered with it; "
            "name the model whose tokenizer goes with it as --target, or leave --chat-template out"
        )
    settings = SourceSettings(paths=sources, **options)
    text = None
    if target:
        from flows.local_target import local_target
        from tasks.target.load import load_target

        text = load_target(local_target(TargetSettings(model=target, chat_template=chat_template)))
    with tempfile.TemporaryDirectory(prefix="regen-validate-") as folder:
        with judging() as progress:
            result = validate(settings, text, Path(folder), for_training=not prompts_only, progress=progress)
        show(result, settings)
        _copy(Path(result.rejected_path), rejected)
        tokens = Path(folder) / "kept_tokens.parquet"
        _copy(tokens if tokens.exists() and not _rows(result.prompts_path) else Path(result.prompts_path), kept)
    payload = _payload(result)
    if report:
        write_json(Path(report), {**payload, "report": result.report.as_dict()})
    if plot:
        _plot(result, settings, Path(plot))
    if result.report.stops:
        raise Outcome(payload, GATE_FAILED)
    return payload


def _payload(result: Any) -> dict[str, Any]:
    details = result.report.details
    return {
        "rows": result.rows,
        "kept": result.kept,
        "rejected": result.rejected,
        "duplicates": result.duplicates,
        "reasons": dict(result.reasons),
        "verdict": result.report.verdict,
        "summary": result.report.summary,
        "duplicate_reasons": details["duplicate_reasons"],
        "regenerate_reasons": dict(result.regenerate_reasons),
        "tokens": {k: v for k, v in details.get("tokens", {}).items() if k not in ("histogram", "example")},
    }


def _rows(path: str) -> int:
    import pyarrow.parquet as pq

    return int(pq.read_metadata(path).num_rows)


def _copy(source: Path, wanted: str | None) -> None:
    if wanted:
        import shutil

        from tasks.errors import StorageError

        try:
            Path(wanted).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, wanted)
        except OSError as error:
            raise StorageError(f"cannot write {wanted}: {error.strerror or error}; choose another path") from error


def _plot(result: Any, settings: Any, path: Path) -> None:
    from tasks.errors import SpecError
    from tasks.runs import write_atomic
    from tasks.validation.plots import histogram_png

    tokens = result.report.details.get("tokens")
    if not tokens:
        raise SpecError("--plot shows masks of tokenized rows; these sources hold none")
    write_atomic(path, histogram_png(tokens["histogram"], settings.min_content_tokens, result.report.summary))
