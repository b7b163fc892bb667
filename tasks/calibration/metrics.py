"""What the field's numbers mean here, from the arrival times of one streamed answer.

TTFT   time to first token: from sending the request to the first chunk that carries a token.
ITL    inter-token latency: the gap before a chunk divided by the tokens it carries, once for each of them. With MTP
       (and with SGLang's `--stream-interval`) one chunk carries several tokens: the raw gap is not a token's latency.
       SGLang's bench_serving divides in the same way.
ICL    inter-chunk latency: the raw gaps, what a person watching a stream sees.
TPOT   time per output token of one answer, without the first: (latency - TTFT) / (tokens - 1), as vLLM's
       benchmark_serving has it. With equal gaps it equals the mean ITL.
Output token throughput: output tokens of all answers (thinking included) that arrived in a window, divided by the
       window's seconds; the prompt's tokens do not count. J/token: mean watts over output token throughput.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.records import LoadWindow


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """One streamed answer: seconds on one clock, and how many tokens each chunk brought."""

    sent_s: float
    arrivals_s: tuple[float, ...]
    tokens: tuple[int, ...]

    def _carrying(self) -> list[tuple[float, int]]:
        return [(at, count) for at, count in zip(self.arrivals_s, self.tokens, strict=True) if count > 0]

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None when none came."""
        carrying = self._carrying()
        return carrying[0][0] - self.sent_s if carrying else None

    @property
    def icl_s(self) -> list[float]:
        """Gaps between chunks that carry tokens."""
        times = [at for at, _ in self._carrying()]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def itl_s(self) -> list[float]:
        """Latency of each token after the first chunk."""
        carrying = self._carrying()
        return [gap / count for gap, (_, count) in zip(self.icl_s, carrying[1:], strict=True) for _ in range(count)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token without the first; None for fewer than two tokens."""
        carrying = self._carrying()
        count = sum(tokens for _, tokens in carrying)
        return (carrying[-1][0] - carrying[0][0]) / (count - 1) if count > 1 else None


def output_tok_s(windows: Sequence[LoadWindow]) -> float:
    """Output token throughput over several windows of one server, tokens per second."""
    seconds = sum(window.duration_s for window in windows)
    return sum(window.output_tokens for window in windows) / seconds if seconds > 0 else 0.0


def j_per_token(window: LoadWindow) -> float | None:
    """Joules an output token; None where watts are unknown or nothing was generated."""
    return window.power_w / window.tok_s if window.power_w is not None and window.tok_s > 0 else None


def median_or_none(values: Sequence[float | None]) -> float | None:
    """Median of what is known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
