"""`regen verify`: every byte of a published set, or of a run, against what was written down when it was made."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import StorageError, VerificationError
from tasks.records import FileEntry
from tasks.runs import read_json
from tasks.storage import LocalStore, Store, open_store
from tasks.upload.chunk import parquet_rows, stored_rows
from tasks.upload.layout import CHUNK_FILES, MANIFEST, PUBLISHED, to_entry
from tasks.upload.manifest import entries, materialise, read_manifest

READERS = 8

ROWS = {
    "completions": "completions",
    "tokens": "token rows",
    "failed": "failed prompts",
    "tokens_rejected": "refused token rows",
    "rejected": "rejected source rows",
    "ids": "settled ids",
    "power": "power samples",
}
"""What a row of each kind is, in the order in which they are told."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was read. `rows` by kind of file; `differences` is empty when every byte and row is what it should be."""

    url: str
    kind: str
    files: int
    bytes: int
    rows: Mapping[str, int]
    differences: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """IDENTICAL or DIFFERENT."""
        return "DIFFERENT" if self.differences else "IDENTICAL"

    @property
    def rows_text(self) -> str:
        """`25 completions, 26 token rows`; kinds without rows are left out."""
        shown = [f"{count:,} {ROWS.get(kind, f'{kind} rows')}" for kind, count in self.rows.items() if count]
        return ", ".join(shown) or "no rows"


def verify(url: str | Path, progress: Callable[[FileEntry], None] | None = None, **options: Any) -> Verification:
    """Read a published set (URL or folder with manifest.json) or a run folder. `options` are `open_store`'s.

    Raises StorageError when there is nothing to verify; differences are data, not exceptions.
    """
    if "://" not in str(url) and (Path(url) / "chunks").is_dir():
        return verify_run(Path(url), progress)
    return verify_published(open_store(url, **options), progress)


def verify_published(store: Store, progress: Callable[[FileEntry], None] | None = None) -> Verification:
    """Every file of every snapshot, the sums of the manifest, and its own digest."""
    try:
        manifest, _ = read_manifest(store)
    except VerificationError as error:
        return Verification(store.url, "published", 0, 0, {}, (str(error),))
    if manifest is None:
        raise StorageError(
            f"{store.url} has no {MANIFEST}: nothing is published there; check the path and the endpoint"
        )
    differences = (
        [] if materialise(manifest) == manifest["current"] else ["manifest: `current` is not its newest snapshot"]
    )
    files = list(entries(manifest))
    differences += compare(store, files, progress)
    return _summary(store.url, "published", files, differences)


def verify_run(folder: Path, progress: Callable[[FileEntry], None] | None = None) -> Verification:
    """Chunk files against the digests taken when they were published; unpublished ones must be whole and add up."""
    differences: list[str] = []
    files: list[FileEntry] = []
    for chunk in sorted(path for path in (folder / "chunks").iterdir() if path.is_dir()):
        if (chunk / PUBLISHED).exists():
            noted = [to_entry(value) for value in read_json(chunk / PUBLISHED)["files"]]
            local = [FileEntry(f"{chunk.name}/{Path(e.key).name}", e.bytes, e.sha256, e.rows, e.kind) for e in noted]
            differences += compare(LocalStore(folder / "chunks"), local, progress)
            files += local
        elif (chunk / "chunk.json").exists():
            differences += _unpublished(chunk, files)
    if not files and not differences and not any(folder.glob("chunks/*/*")):
        raise StorageError(f"{folder} has no chunks yet: nothing to verify")
    return _summary(str(folder), "run", files, differences)


def compare(store: Store, files: Iterable[FileEntry], progress: Callable[[FileEntry], None] | None = None) -> list[str]:
    """One line a difference. Bytes and sha256 of every file; rows of every Parquet file."""

    def one(entry: FileEntry) -> str | None:
        try:
            store.verify(entry)
            if entry.rows is not None:
                found = stored_rows(store, entry.key)
                if found != entry.rows:
                    return f"{store.url}/{entry.key}: {found} rows, expected {entry.rows}"
        except VerificationError as error:
            return str(error)
        if progress:
            progress(entry)
        return None

    with ThreadPoolExecutor(READERS) as pool:
        return [line for line in pool.map(one, files) if line]


def _unpublished(chunk: Path, files: list[FileEntry]) -> list[str]:
    """Nobody wrote digests down yet: Parquet files must be whole and have as many rows as chunk.json says."""
    record = read_json(chunk / "chunk.json")
    lines = []
    for name in CHUNK_FILES:
        path = chunk / name
        if path.suffix != ".parquet" or not path.exists():
            continue
        try:
            rows = parquet_rows(path)
        except VerificationError as error:
            lines.append(str(error))
            continue
        files.append(FileEntry(f"{chunk.name}/{name}", path.stat().st_size, "", rows, CHUNK_FILES[name]))
        expected = {"completions.parquet": record.get("done"), "failed.parquet": record.get("failed")}.get(name)
        if expected is not None and rows != expected:
            lines.append(f"{path}: {rows} rows, chunk.json says {expected}")
    return lines


def _summary(url: str, kind: str, files: list[FileEntry], differences: list[str]) -> Verification:
    rows: dict[str, int] = {}
    for entry in files:
        if entry.rows is not None:
            rows[entry.kind] = rows.get(entry.kind, 0) + entry.rows
    rows = {name: rows[name] for name in (*ROWS, *rows) if name in rows}
    return Verification(url, kind, len(files), sum(entry.bytes for entry in files), rows, tuple(differences))
