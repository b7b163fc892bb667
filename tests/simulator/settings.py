"""What a simulated server is like. Rates are per simulated second; `speedup` of these pass in a real one."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SimSettings:
    """`api`: `sglang` (0.5.17, token ids on chat), `sglang-old` (0.5.11, ids only on /generate) or `plain` (chat only).

    Throughput: `request_tok_s` for one request alone; with `saturation` requests running the total is half of
    `request_tok_s * saturation * 2`: tok/s(n) = request_tok_s * n / (1 + n / saturation). `saturation=inf` makes the
    time of a request independent of load. Lengths are log-normal in tokens. `kv_tokens` bounds prompt + generated
    tokens of what runs (the newest is retracted when it is full). `power_idle_w`..`power_limit_w` follow the load.
    """

    seed: int = 0
    api: Literal["sglang", "sglang-old", "plain"] = "sglang"
    model: str = "simulator/toy"
    max_running: int = 16
    context_tokens: int = 32768
    kv_tokens: float = math.inf
    request_tok_s: float = 100.0
    saturation: float = math.inf
    prefill_weight: float = 0.0
    median_tokens: float = 100.0
    sigma: float = 1.0
    min_tokens: int = 12
    max_tokens: int = 32768
    think_share: float = 0.6
    accept_length: float | None = 2.9
    startup_s: float = 0.0
    speedup: float = 1.0
    power_idle_w: float = 124.0
    power_limit_w: float = 700.0
    length_by_prompt: bool = False
    metrics: bool = True

    def total_tok_s(self, running: int) -> float:
        """Simulated output tokens a second with `running` requests."""
        return self.request_tok_s * running / (1.0 + running / self.saturation) if running else 0.0

    def power_w(self, running: int) -> float:
        """Mean watts at that load: 60 % of the dynamic range at once (weights are read anyway), then with load."""
        if not running:
            return self.power_idle_w
        share = min(1.0, running / max(1, self.max_running)) ** 0.5
        return self.power_idle_w + (self.power_limit_w - self.power_idle_w) * (0.6 + 0.4 * share)
