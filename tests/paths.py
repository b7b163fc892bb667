"""Where tests find data that is not part of the project. Tests skip, and say so, where it is missing."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def _shared() -> Path | None:
    folder = Path(os.environ.get("REGEN_TEST_SHARED", REPOSITORY.parent / "shared"))
    return folder if folder.is_dir() else None


SHARED = _shared()
needs_shared = pytest.mark.skipif(
    SHARED is None, reason="the shared test data (cases, captures) is not on this machine"
)


def shared(relative: str) -> Path:
    """A file of the shared test data; skips the calling test where it is missing."""
    if SHARED is None or not (SHARED / relative).exists():
        pytest.skip(f"shared test data {relative} is not on this machine")
    return SHARED / relative
