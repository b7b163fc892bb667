"""What the tests of validation share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import polars as pl
import pytest

from tasks.records import ValidationResult
from tasks.validation.run import validate
from tasks.validation.settings import SourceSettings


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (dicts, or bytes as they are) to a JSONL file."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join((r if isinstance(r, bytes) else orjson.dumps(r)) + b"\n" for r in rows))
        return path

    return write


class Judged:
    """A result with its two files read."""

    def __init__(self, result: ValidationResult) -> None:
        self.result = result
        self.prompts = pl.read_parquet(result.prompts_path)
        self.rejected = pl.read_parquet(result.rejected_path)

    @property
    def reasons(self) -> dict[int, str]:
        """{row number: reason} of everything that was not kept."""
        return dict(self.rejected.select("row", "reason").iter_rows())

    @property
    def sums(self) -> tuple[int, int, int, int]:
        """rows, kept, rejected, duplicates."""
        r = self.result
        return r.rows, r.kept, r.rejected, r.duplicates


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., Judged]:
    """Runs `validate` over paths; keyword arguments go to the settings or to `validate`."""

    def run(*paths: Path | str, target: Any = None, **options: Any) -> Judged:
        calls = {k: options.pop(k) for k in ("samples", "for_training", "skip_ids", "progress") if k in options}
        settings = SourceSettings(paths=tuple(map(str, paths)), **options)
        return Judged(validate(settings, target, tmp_path / "out", **calls))

    return run
