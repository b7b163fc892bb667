"""What the breaker saw is in the run's record, where the report reads it."""

from types import SimpleNamespace
from typing import Any

import pytest

from flows import stages
from tasks.errors import GateError


async def test_the_breakers_evidence_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stopped(*_: Any) -> None:
        raise GateError("over the budget", {"gate": "generation", "verdict": "OVER_BUDGET"})

    async def opened(_: int) -> None:
        return None

    monkeypatch.setattr(stages, "generate_chunk", stopped)
    facts: dict[str, Any] = {}
    settings = SimpleNamespace(generation=SimpleNamespace(open_chunks=1))
    run: Any = SimpleNamespace(spec=settings, facts=facts, note=facts.update)
    engine: Any = SimpleNamespace(wait_open=opened, chunk_indices=[0])
    with pytest.raises(GateError):
        await stages.chunks(run, engine)
    assert facts["gates"]["generation"]["verdict"] == "OVER_BUDGET"
