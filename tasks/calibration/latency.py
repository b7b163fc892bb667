"""Time to first token under load: one short streamed request after a window; its answer is no data."""

import secrets
from collections.abc import Sequence

from tasks.client.chat import ChatClient
from tasks.client.outcomes import ChatRequest, OutcomeKind, Sampling
from tasks.records import Server

PROMPT = "Name three rivers and one mountain, each with its country and one sentence about it."
TOKENS = 8
DEADLINE_S = 60.0


class LatencyProbe:
    """`await probe(name)` is the TTFT of server `name` in seconds at its present load, or None."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = {server.name: server for server in servers}

    async def __call__(self, name: str) -> float | None:
        """One probe. A server that refuses or answers nothing gives None: a missing number, not a failure."""
        server = self._servers.get(name)
        if server is None:
            return None
        request = ChatRequest(
            request_id=f"probe-{secrets.token_hex(12)}",
            messages=[{"role": "user", "content": PROMPT}],
            sampling=Sampling(max_tokens=TOKENS),
        )
        async with ChatClient(server, limit=1) as client:
            outcome = await client.stream(request, DEADLINE_S)
        return outcome.ttft_s if outcome.kind in (OutcomeKind.OK, OutcomeKind.CUT) else None
