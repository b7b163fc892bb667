"""Output files of an export: numbered, of bounded size, and never over somebody else's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from tasks.errors import SpecError

OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


def prepare_folder(out: Path) -> Path:
    """An empty folder. Raises SpecError when something lies there: an export never deletes and never mixes."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SpecError(f"{out} is not empty; choose another --out, or remove it yourself")
    out.mkdir(parents=True, exist_ok=True)
    return out


class JsonLines:
    """`train-00000.jsonl`, `train-00001.jsonl`…, each with at most `shard_rows` rows, written under hidden names."""

    def __init__(self, out: Path, shard_rows: int) -> None:
        self._out, self._shard_rows = out, shard_rows
        self._file: BinaryIO | None = None
        self._in_shard = 0
        self.files: list[Path] = []
        self.rows = 0

    def write(self, row: dict[str, Any]) -> None:
        """Append one object as one line; NumPy arrays become lists."""
        if self._file is None or self._in_shard >= self._shard_rows:
            self._next()
        assert self._file is not None
        self._file.write(orjson.dumps(row, option=OPTIONS))
        self._in_shard += 1
        self.rows += 1

    def _next(self) -> None:
        self._finish()
        path = self._out / f"train-{len(self.files):05d}.jsonl"
        self._file = _hidden(path).open("wb")
        self.files.append(path)
        self._in_shard = 0

    def _finish(self) -> None:
        if self._file is not None:
            self._file.close()
            _hidden(self.files[-1]).replace(self.files[-1])
            self._file = None

    def close(self) -> None:
        """Give the last file its name."""
        self._finish()

    def drop(self) -> None:
        """Remove the file that was being written."""
        if self._file is not None:
            self._file.close()
            _hidden(self.files.pop()).unlink(missing_ok=True)
            self._file = None


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


@contextmanager
def json_lines(out: Path, shard_rows: int) -> Iterator[JsonLines]:
    """A JsonLines that keeps only whole files."""
    lines = JsonLines(out, shard_rows)
    try:
        yield lines
        lines.close()
    except BaseException:
        lines.drop()
        raise
