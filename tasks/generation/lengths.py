"""Observed answer lengths (a bounded random sample) and token counts over time."""

import random
from collections import deque

SAMPLE = 20_000
WINDOW_S = 60.0


class Lengths:
    """Reservoir of answer lengths in tokens, and the mean rate of one request for the ages of what is in flight."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._lengths: list[float] = []
        self._seen = 0
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, latency_s: float) -> None:
        """One finished answer."""
        self._seen += 1
        self._tokens += tokens
        self._seconds += latency_s
        if len(self._lengths) < SAMPLE:
            self._lengths.append(float(tokens))
        else:
            at = self._rng.randrange(self._seen)
            if at < SAMPLE:
                self._lengths[at] = float(tokens)

    @property
    def request_tok_s(self) -> float:
        """Mean tokens a second of one request."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def observed(self) -> list[float]:
        """The sample, tokens."""
        return list(self._lengths)


class Meter:
    """Output tokens of the last minute, in one-second buckets."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, float]] = deque()
        self._sum = 0.0
        self._first: float | None = None

    def add(self, now_s: float, tokens: float) -> None:
        """Count tokens that arrived now."""
        self._first = now_s if self._first is None else self._first
        second = int(now_s)
        if self._buckets and self._buckets[-1][0] == second:
            self._buckets[-1] = (second, self._buckets[-1][1] + tokens)
        else:
            self._buckets.append((second, tokens))
        self._sum += tokens
        self._trim(now_s)

    def _trim(self, now_s: float) -> None:
        while self._buckets and self._buckets[0][0] < now_s - WINDOW_S:
            self._sum -= self._buckets.popleft()[1]

    def rate(self, now_s: float) -> float:
        """Tokens a second over the last minute (or since the first answer)."""
        if self._first is None:
            return 0.0
        self._trim(now_s)
        return max(0.0, self._sum) / max(1.0, min(WINDOW_S, now_s - self._first))


class TokenClock:
    """Tokens made so far per server, from answers alone: each answer's tokens lie evenly over its duration.

    For servers that have no live counter. What is in flight counts at the mean rate of what has finished there.
    """

    def __init__(self) -> None:
        self._done: dict[str, float] = {}
        self._rate: dict[str, tuple[float, float]] = {}
        self._begun: dict[str, dict[str, float]] = {}

    def begin(self, server: str, key: str, now_s: float) -> None:
        """A request was sent."""
        self._begun.setdefault(server, {})[key] = now_s

    def end(self, server: str, key: str, tokens: int, now_s: float) -> None:
        """It ended; `tokens` 0 when nothing came."""
        begun = self._begun.get(server, {}).pop(key, None)
        if begun is None or not tokens:
            return
        self._done[server] = self._done.get(server, 0.0) + tokens
        made, seconds = self._rate.get(server, (0.0, 0.0))
        # Older answers fade: the rate follows the present limit.
        self._rate[server] = (made * 0.98 + tokens, seconds * 0.98 + now_s - begun)

    def total(self, server: str, now_s: float) -> float:
        """Tokens so far, those of unfinished answers estimated."""
        made, seconds = self._rate.get(server, (0.0, 0.0))
        rate = made / seconds if seconds > 0 else 0.0
        ages = sum(now_s - begun for begun in self._begun.get(server, {}).values())
        return self._done.get(server, 0.0) + rate * ages
