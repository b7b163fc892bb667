"""One unit of work: read rows, judge each, leave sorted rows and rejects on disk. Runs in a worker process."""

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.errors import DatasetError
from tasks.validation.columns import columnar_rows
from tasks.validation.lines import Block
from tasks.validation.lines import rows as line_rows
from tasks.validation.policy import Policy
from tasks.validation.reasons import Reason, RowError
from tasks.validation.scan import scan_unit
from tasks.validation.spill import Collected, rejects_table, write_kept, write_table
from tasks.validation.tokenized import TokenPart, TokenRows, decode_prompts, rules_of
from tasks.validation.units import Source, Unit

ID_FIELDS = ("id", "uuid", "conversation_id", "question_id", "prompt_id", "primary_id")


@dataclass(frozen=True, slots=True)
class UnitResult:
    """What a worker tells its parent: sums and where the rows are. Small, whatever the unit held.

    `parts` are tokenized rows that the tally has yet to end; `observed` are those that ended as prompts or rejects.
    """

    index: int
    rows: int
    kept: int
    reasons: Counter[str]
    regenerate: Counter[str]
    kept_path: str | None = None
    rejects_path: str | None = None
    parts: list[TokenPart] = field(default_factory=list)
    observed: list[TokenPart] = field(default_factory=list)
    signatures: list[tuple[list[str], bytes]] = field(default_factory=list)


_state: dict[str, Any] = {}


def start(policy: Policy, folder: str, partitions: int) -> None:
    """Give this process what every unit needs (the initializer of the pool)."""
    _state.update(policy=policy, folder=Path(folder), partitions=partitions)


def work(unit: Unit) -> UnitResult:
    """Judge every row of `unit`. A row never raises; only an unreadable file does (DatasetError)."""
    # Rows are trees without cycles, made and dropped by the million: the collector would only walk over them.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _work(unit, _state["policy"])
    finally:
        if collecting:
            gc.enable()


def _work(unit: Unit, policy: Policy) -> UnitResult:
    collected = Collected(unit.source.index, unit.source.label)
    if unit.source.tokenized:
        return _tokenized(unit, policy, collected)
    tokenized = TokenRows(unit.source.label)
    for number, value in unit_rows(unit, policy):
        collected.rows += 1
        if isinstance(value, RowError):
            collected.reject(number, None, value)
        elif type(value) is dict and value.get("input_ids") is not None:
            tokenized.add(number, _row_id(value), value)
        else:
            try:
                collected.keep(number, _row_id(value), policy.keep(value, columnar=unit.columnar))
            except RowError as error:
                collected.reject(number, _row_id(value), error)
            except (ValueError, TypeError, RecursionError, OverflowError) as error:
                # Not expected: canonical() answers for every JSON value. The row is data all the same.
                failure = RowError(Reason.UNREADABLE_ROW, f"{type(error).__name__}: {error}")
                collected.reject(number, _row_id(value), failure)
    return _leave(unit, policy, collected, tokenized.judge(policy, collected))


def _tokenized(unit: Unit, policy: Policy, collected: Collected) -> UnitResult:
    """A unit of a tokenized column store: scanned in columns; decoded to prompts where one regenerates."""
    parts = []
    for part, ids in scan_unit(unit, rules_of(policy)):
        collected.rows += len(part.rows)
        parts.append(part)
        if not policy.for_training:
            decode_prompts(ids, part, policy, collected)
    return _leave(unit, policy, collected, parts)


def unit_rows(unit: Unit, policy: Policy) -> Iterator[tuple[int, Any]]:
    """(row number, value or RowError) of every row of a unit."""
    block = unit.block
    if block is None:
        return columnar_rows(unit)
    max_line = policy.settings.max_line_bytes
    if block.oversize:
        detail = f"{block.length} bytes, the limit is {max_line}"
        return iter([(block.first_row, RowError(Reason.LINE_TOO_LONG, detail))])
    data = block.data
    if data is None:
        data = _read(unit.source, block)
    found = line_rows(data, block.first_row, max_line=max_line, last=block.last)
    return found if unit.rows >= block.lines else _first(found, block.first_row + unit.rows)


def _read(source: Source, block: Block) -> bytes:
    try:
        with Path(source.path).open("rb") as file:
            file.seek(block.start)
            return file.read(block.length)
    except OSError as error:
        raise DatasetError(
            f"cannot read {source.label}: {error.strerror or error}; did it change meanwhile?"
        ) from error


def _first(found: Iterator[tuple[int, Any]], end: int) -> Iterator[tuple[int, Any]]:
    for number, value in found:
        if number >= end:
            return
        yield number, value


def _row_id(value: Any) -> str | None:
    if type(value) is not dict:
        return None
    found = value.get("id")
    if type(found) is str and len(found) <= 200 and found.isascii():
        return found
    found = next((value[name] for name in ID_FIELDS if value.get(name) is not None), None)
    return None if found is None else str(found)[:200].encode("utf-8", "replace").decode()


def _leave(unit: Unit, policy: Policy, collected: Collected, parts: list[TokenPart]) -> UnitResult:
    folder: Path = _state["folder"]
    kept_path = rejects_path = None
    if collected.kept:
        kept_path = str(folder / f"kept-{unit.index:06d}.arrow")
        write_kept(Path(kept_path), collected, _state["partitions"])
    if collected.rejects:
        rejects_path = str(folder / f"rejects-{unit.index:06d}.arrow")
        write_table(Path(rejects_path), rejects_table(collected.source, collected.rejects))
    firsts = [entry for entry in collected.kept if entry[2] == 0]
    return UnitResult(
        unit.index,
        collected.rows,
        len(firsts),
        Counter(reject[2] for reject in collected.rejects),
        Counter(entry[1].regenerate_reason for entry in firsts if entry[1].regenerate_reason),
        kept_path,
        rejects_path,
        parts if policy.for_training else [],
        [] if policy.for_training else parts,
        _signatures(policy, firsts),
    )


def _signatures(policy: Policy, firsts: list[Any]) -> list[tuple[list[str], bytes]]:
    if not policy.settings.near_duplicates:
        return []
    from tasks.validation.near import signature

    return [(entry[1].ids, signature(entry[1].turns)) for entry in firsts]
