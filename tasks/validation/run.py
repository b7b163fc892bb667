"""Validation of a whole set: sources in; prompts.parquet, rejected.parquet, sums and a verdict out."""

import multiprocessing
import os
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tasks.errors import DatasetError, SpecError, StorageError
from tasks.records import ValidationResult
from tasks.validation import worker
from tasks.validation.merge import Exclusions, Merged, Writer, merge_kept
from tasks.validation.near import near_duplicates
from tasks.validation.overlap import benchmark_ngrams
from tasks.validation.plan import units
from tasks.validation.policy import Policy, make_policy
from tasks.validation.published import read_ids
from tasks.validation.scan import scan_units
from tasks.validation.schema import KEPT_TOKENS, PROMPTS, REJECTED
from tasks.validation.settings import SourceSettings
from tasks.validation.sources import resolve
from tasks.validation.spill import read_rejects
from tasks.validation.sums import prove
from tasks.validation.tally import TokenSums, observe, summarise
from tasks.validation.texts import benchmark_texts
from tasks.validation.tokenized import TokenPart, rules_of
from tasks.validation.units import Source, Unit
from tasks.validation.verdict import Sums, judge

if TYPE_CHECKING:  # importing it loads transformers, which a set without a target need not wait for
    from tasks.target.text import TargetText

RESULTS = ("prompts", "rejected", "kept_tokens")
"""Names of the files that validation leaves; the last only where tokenized rows are judged for training."""

SMALL_BYTES = 24 << 20
"""Below this, starting worker processes (about 1.5 s) costs more than they save."""

PARTITION_BYTES = 24 << 20
"""Of input, a partition of the id space: the merge holds two at a time."""

Progress = Callable[[int, int], None]
"""Called with (bytes judged, bytes in all); bytes are those of the input, estimated for column stores."""


@dataclass(slots=True)
class _Found:
    """What the units told."""

    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    kept_paths: list[str] = field(default_factory=list)
    reject_paths: list[str] = field(default_factory=list)
    parts: list[TokenPart] = field(default_factory=list)
    observed: list[TokenPart] = field(default_factory=list)
    signatures: list[tuple[list[str], bytes]] = field(default_factory=list)


def validate(
    settings: SourceSettings,
    target: "TargetText | None",
    out_dir: Path,
    *,
    samples: int = 1,
    for_training: bool = False,
    skip_ids: Container[str] | Path | None = None,
    progress: Progress | None = None,
) -> ValidationResult:
    """Judge every row of `settings.paths`; write prompts.parquet (sorted by prompt_id) and rejected.parquet.

    `for_training` asks "may I train on this?": a bad old response is a reject, and messages are stored whole. Otherwise
    only prompts count, and a bad old response becomes a `regenerate_reason`. `kept` counts rows; a row gives `samples`
    prompts (`report.details["prompts"]` counts those). `skip_ids` holds ids that are done: a container, or a file.

    Raises DatasetError when a source cannot be read, VerificationError when the sums are not proven by id.
    """
    folder = _working_folder(out_dir)
    try:
        sources = resolve(settings, folder)
        _check_target(sources, target, for_training)
        grams = benchmark_ngrams(benchmark_texts(settings, folder), settings.decontaminate_ngram)
        policy = make_policy(settings, target, samples=samples, for_training=for_training, benchmark_ngrams=grams)
        found, partitions = _judge_all(sources, policy, folder, progress)
        if not found.rows:
            raise DatasetError(f"{', '.join(settings.paths)}: not one row in {len(sources)} file(s)")
        result = _finish(found, partitions, sources, policy, folder, skip_ids)
        return _publish(result, folder, out_dir)
    except OSError as error:
        raise StorageError(f"cannot write under {out_dir}: {error.strerror or error}; free space there") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _working_folder(out_dir: Path) -> Path:
    """A folder for spilled rows beside the results; those of processes that were killed are removed."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for left in out_dir.glob(".validation-*"):
            owner = left.name.split("-")[1]
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f".validation-{os.getpid()}-", dir=out_dir))
    except OSError as error:
        raise StorageError(f"cannot create {out_dir}: {error.strerror or error}; choose another folder") from error


def _check_target(sources: list[Source], target: "TargetText | None", for_training: bool) -> None:
    tokenized = next((source for source in sources if source.tokenized), None)
    if tokenized and target is None and not for_training:
        raise SpecError(f"{tokenized.label} is tokenized: a target is needed to read its rows back as prompts")


def _judge_all(sources: list[Source], policy: Policy, folder: Path, progress: Progress | None) -> tuple[_Found, int]:
    total = sum(Path(source.path).stat().st_size for source in sources)
    partitions = max(1, min(256, total // PARTITION_BYTES))
    found, judged = _Found(), 0

    def advance(unit: Unit) -> None:
        nonlocal judged
        judged += unit.weight_bytes
        if progress:
            progress(min(judged, total), total)

    ordered = units(sources, policy.settings)
    if policy.for_training and all(source.tokenized for source in sources):
        for part in scan_units(ordered, rules_of(policy), policy.settings.workers, advance):
            found.rows += len(part.rows)
            found.parts.append(part)
        return found, partitions
    for result, unit in _results(ordered, policy, folder, partitions, total):
        found.rows += result.rows
        found.reasons.update(result.reasons)
        found.kept_paths += [result.kept_path] if result.kept_path else []
        found.reject_paths += [result.rejects_path] if result.rejects_path else []
        found.parts += result.parts
        found.observed += result.observed
        found.signatures += result.signatures
        advance(unit)
    return found, partitions


def _results(
    ordered: Iterable[Unit], policy: Policy, folder: Path, partitions: int, total: int
) -> Iterator[tuple[worker.UnitResult, Unit]]:
    """Results in the order of units, from worker processes where that pays."""
    processes = policy.settings.workers or min(os.cpu_count() or 1, 8)
    arguments = (policy, str(folder), partitions)
    if processes == 1 or total < SMALL_BYTES:
        worker.start(*arguments)
        yield from ((worker.work(unit), unit) for unit in ordered)
        return
    # Spawned, not forked: the parent has threads (Prefect, pyarrow), and a fork would copy their locks.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=worker.start, initargs=arguments)
    try:
        yield from _windowed(pool, ordered, processes)
    except BrokenProcessPool as error:
        raise DatasetError(
            "a validation worker died (most often: killed for memory); set source.workers lower or free memory"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _windowed(pool: Executor, ordered: Iterable[Unit], processes: int) -> Iterator[tuple[worker.UnitResult, Unit]]:
    waiting: deque[tuple[Future[worker.UnitResult], Unit]] = deque()
    for unit in ordered:
        waiting.append((pool.submit(worker.work, unit), unit))
        if len(waiting) > 2 * processes:
            future, first = waiting.popleft()
            yield future.result(), first
    while waiting:
        future, first = waiting.popleft()
        yield future.result(), first


def _finish(
    found: _Found,
    partitions: int,
    sources: list[Source],
    policy: Policy,
    folder: Path,
    skip_ids: Container[str] | Path | None,
) -> ValidationResult:
    prompts, rejected, tokens = (folder / f"{name}.parquet" for name in RESULTS)
    settings = policy.settings
    exclude = Exclusions(read_ids(skip_ids), near_duplicates(found.signatures, settings.near_duplicate_threshold))
    with Writer(prompts, PROMPTS) as out, Writer(rejected, REJECTED) as bad:
        for path in found.reject_paths:
            bad.write(read_rejects(path))
        merged = Merged()
        if found.kept_paths:
            merged = merge_kept(found.kept_paths, [s.label for s in sources], partitions, out, bad, exclude)
        token_sums = _token_sums(found.parts, found.observed, policy, tokens, bad)
    prove(prompts, tokens, rejected, found.rows)
    return _result(found, merged, token_sums, policy, prompts, rejected)


def _publish(result: ValidationResult, folder: Path, out_dir: Path) -> ValidationResult:
    """Move the finished files to their place: a crash leaves the old ones or the new ones, never half a file."""
    for name in RESULTS:
        made, place = folder / f"{name}.parquet", out_dir / f"{name}.parquet"
        if made.exists():
            made.replace(place)
        else:
            place.unlink(missing_ok=True)
    prompts, rejected = (str(out_dir / f"{name}.parquet") for name in RESULTS[:2])
    return replace(result, prompts_path=prompts, rejected_path=rejected)


def _token_sums(
    parts: list[TokenPart], observed: list[TokenPart], policy: Policy, path: Path, bad: Writer
) -> TokenSums:
    decode = policy.target.decode if policy.target else None
    if not parts:
        return TokenSums(details=observe(observed, policy.settings.min_content_tokens, decode))
    with Writer(path, KEPT_TOKENS) as kept:
        return summarise(parts, policy.settings.min_content_tokens, kept, bad, decode)


def _result(
    found: _Found, merged: Merged, tokens: TokenSums, policy: Policy, prompts: Path, rejected: Path
) -> ValidationResult:
    reasons: dict[str, Any] = dict((found.reasons + tokens.reasons).most_common())
    lost = merged.lost + tokens.lost
    kept = merged.kept + tokens.kept
    sums = Sums(found.rows, kept, reasons, dict(lost), dict(merged.regenerate), merged.prompts, tokens.details)
    report = judge(sums, policy.settings, for_training=policy.for_training)
    return ValidationResult(
        prompts_path=str(prompts),
        rejected_path=str(rejected),
        rows=sums.rows,
        kept=sums.kept,
        rejected=sums.rejected,
        duplicates=sums.duplicate_rows,
        reasons=reasons,
        regenerate_reasons=dict(merged.regenerate),
        report=report,
    )
