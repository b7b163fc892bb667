"""Optional parity canary: greedy answers to fixed prompts, with and without speculation, compared.

Speculation is exact in theory; batching and kernels are not bit-equal, so a rate is reported, not demanded to be 1.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tasks.provisioning.settings import MtpSettings
from tasks.provisioning.start import Recipe, Starter
from tasks.provisioning.wire import call
from tasks.records import Expectation, GateReport, Level, Server

PROMPTS = (
    "List the first ten prime numbers.",
    "Translate into French: the weather is fine today.",
    "What is 17 times 23? Show the steps.",
    "Name the planets of the solar system in order.",
)
TOKENS = 128
LEAST_SHARE = 0.5
"""Below this even differing kernels are no excuse."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Answers of the same server without speculation, and its single-request speed in output tokens per second."""

    answers: Mapping[str, str]
    tok_s: float | None


def ask_all(server: Server, prompts: Sequence[str] = PROMPTS) -> Reference:
    """Greedy answers, one after another."""
    answers, tokens, began = dict[str, str](), 0, time.monotonic()
    for prompt in prompts:
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": TOKENS,
            "temperature": 0,
        }
        value = call(f"{server.base_url}/v1/chat/completions", body, api_key=server.api_key, timeout_s=300).object()
        choices = value.get("choices") or []
        if choices:
            message = choices[0].get("message") or {}
            answers[prompt] = f"{message.get('reasoning_content') or ''}{message.get('content') or ''}"
            tokens += int((value.get("usage") or {}).get("completion_tokens") or 0)
    seconds = time.monotonic() - began
    return Reference(answers, tokens / seconds if tokens and seconds > 0 else None)


def take_reference(starter: Starter, recipe: Recipe, say: Callable[[str], None]) -> Reference | None:
    """Start the server once without MTP, keep its answers, end it. None when it has no MTP to leave out."""
    if recipe.config is None or recipe.config.mtp is None:
        return None
    say(f"{recipe.name}: parity canary, first without speculation")
    started = starter.start(replace(recipe, config=replace(recipe.config, mtp=None)), reason="parity canary, no MTP")
    try:
        return ask_all(started.server)
    finally:
        started.running.stop()


def compare(servers: Sequence[Server], reference: Mapping[str, str], settings: MtpSettings) -> GateReport:
    """How many answers are word for word those of the reference."""
    checks = []
    for server in servers:
        answers = ask_all(server, list(reference)).answers
        same = sum(answers.get(prompt) == text for prompt, text in reference.items())
        share = same / len(reference) if reference else 0.0
        passed = bool(reference) and share >= LEAST_SHARE
        text = f"{same} of {len(reference)} greedy answers are the same with and without speculation"
        checks.append(Expectation(server.name, passed, text, Level.WARNING, {"share": share}))
    good = all(check.passed for check in checks)
    return GateReport(
        gate="mtp_parity",
        verdict="SAME" if good else "DIFFERENT",
        level=Level.OK if good else Level.WARNING,
        mode=settings.gate,
        summary="; ".join(f"{check.name}: {check.message}" for check in checks),
        expectations=tuple(checks),
    )
