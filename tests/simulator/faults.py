"""Faults on command. Which request is hit is a function of (seed, prompt, request seed), never of time."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

RequestFault = Literal[
    "error_500",
    "error_429",
    "error_503",
    "abort",
    "truncated",
    "reset",
    "garbage",
    "empty",
    "no_thinking",
    "unclosed_think",
    "reasoning_in_content",
    "leaked_stop",
    "tool_as_text",
    "loop",
    "one_token",
    "wrong_usage",
    "bad_ids",
    "cut",
]
ServerFault = Literal["crash", "hang", "wedge", "slow"]
REQUEST_FAULTS: tuple[RequestFault, ...] = RequestFault.__args__  # type: ignore[attr-defined]
SERVER_FAULTS: tuple[ServerFault, ...] = ServerFault.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Fault:
    """A server-level fault `after_s` real seconds, or after `after_requests`, for `lasts_s` real seconds.

    crash: connections reset, then refused. hang: HTTP answers, nothing is generated, the heartbeat stands still.
    wedge: the same with a fresh heartbeat and /health 200. slow: throughput divided by `factor`.
    """

    kind: ServerFault
    after_s: float | None = None
    after_requests: int | None = None
    lasts_s: float | None = None
    factor: float = 4.0


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """`rates`: share of requests hit by each request-level fault; `always`: by words in the prompt."""

    seed: int = 0
    rates: Mapping[RequestFault, float] = field(default_factory=dict)
    always: Mapping[str, RequestFault] = field(default_factory=dict)

    def draw(self, prompt: str, request_seed: int | None, rid: str = "") -> RequestFault | None:
        """The fault of this request, if any. A busy answer passes when the same question comes again (other `rid`)."""
        for word, fault in self.always.items():
            if word in prompt:
                return fault
        if not self.rates:
            return None
        again = rid if set(self.rates) <= {"error_429", "error_503"} else ""
        text = f"{self.seed}|{request_seed}|{again}|{prompt}".encode()
        point = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
        for fault, rate in self.rates.items():
            if point < rate:
                return fault
            point -= rate
        return None
