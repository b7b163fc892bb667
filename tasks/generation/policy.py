"""What to do after an attempt. One layer of retries for everything, bounded, with jitter. Pure."""

import random
from dataclasses import dataclass
from enum import Enum

from tasks.client.chat import ChatOutcome, OutcomeKind
from tasks.generation.reasons import Reason
from tasks.generation.settings import GenerationSettings

REQUEUES_PER_ATTEMPT = 3  # moves that are the servers' fault, for each allowed attempt
DEADLINE_FLOOR_S = 60.0  # queueing and prefill
PREFILL_TOK_S = 500.0  # slowest acceptable prompt processing
MARGIN_TOKENS = 16  # SGLang counts four prompt tokens more under MTP and keeps a few for itself


class Do(Enum):
    """What follows."""

    ACCEPT = "accept"
    RETRY = "retry"  # a new attempt: another seed
    REQUEUE = "requeue"  # the same attempt again, elsewhere or later
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Action:
    """`max_tokens` is the limit of the next attempt where it changes."""

    do: Do
    reason: Reason | None = None
    delay_s: float = 0.0
    max_tokens: int | None = None


_REASONS = {
    OutcomeKind.ABORTED: Reason.ABORTED,
    OutcomeKind.RETRY_LATER: Reason.RETRY_LATER,
    OutcomeKind.SERVER_ERROR: Reason.SERVER_ERROR,
    OutcomeKind.CONNECTION: Reason.CONNECTION,
    OutcomeKind.TIMEOUT: Reason.TIMEOUT,
    OutcomeKind.BAD_REQUEST: Reason.BAD_REQUEST,
    OutcomeKind.OVERFLOW: Reason.CONTEXT_OVERFLOW,
    OutcomeKind.MALFORMED: Reason.MALFORMED,
}
_TERMINAL = frozenset({OutcomeKind.BAD_REQUEST, OutcomeKind.OVERFLOW})
_CUTS = frozenset({Reason.TRUNCATED_BY_LENGTH, Reason.TRUNCATED_IN_REASONING})


def reason_of(outcome: ChatOutcome) -> Reason | None:
    """The reason code of an outcome that is no answer; None for OK and CUT."""
    return _REASONS.get(outcome.kind)


def after_failure(
    outcome: ChatOutcome, *, attempt: int, requeues: int, server_down: bool, settings: GenerationSettings
) -> Action:
    """After an attempt that brought no answer. What is the server's fault does not use up an attempt."""
    reason = _REASONS[outcome.kind]
    if outcome.kind in _TERMINAL:
        return Action(Do.FAIL, reason)
    busy = outcome.kind is OutcomeKind.RETRY_LATER
    if busy or (server_down and outcome.kind is OutcomeKind.CONNECTION):
        if requeues >= settings.max_attempts * REQUEUES_PER_ATTEMPT:
            return Action(Do.FAIL, reason)
        wait = backoff(requeues, settings) if busy else 0.0
        return Action(Do.REQUEUE, reason, max(wait, outcome.retry_after_s or 0.0))
    return _again(reason, attempt, settings, backoff(attempt, settings))


def after_answer(
    reason: Reason | None, *, attempt: int, max_tokens: int, room: int | None, settings: GenerationSettings
) -> Action:
    """After an answer was judged. `room` is the largest limit that still fits the context window, where known."""
    if reason is None:
        return Action(Do.ACCEPT)
    if reason in _CUTS:
        if settings.on_length == "keep_prefix":
            return Action(Do.ACCEPT, reason)
        larger = int(max_tokens * settings.retry_larger_factor)
        larger = min(larger, room) if room is not None else larger
        if settings.on_length == "reject" or larger <= max_tokens:
            return Action(Do.FAIL, reason)
        action = _again(reason, attempt, settings, 0.0)
        return Action(action.do, reason, 0.0, larger)
    return _again(reason, attempt, settings, 0.0)


def _again(reason: Reason, attempt: int, settings: GenerationSettings, delay_s: float) -> Action:
    last = attempt + 1 >= settings.max_attempts
    return Action(Do.FAIL, reason) if last else Action(Do.RETRY, reason, delay_s)


def backoff(count: int, settings: GenerationSettings, rng: random.Random | None = None) -> float:
    """Exponential with full jitter: two clients never come back together."""
    ceiling = min(settings.retry_most_s, settings.retry_base_s * 2.0**count)
    return (rng or random).uniform(0.25, 1.0) * ceiling


def deadline_s(max_tokens: int, prompt_tokens: int, settings: GenerationSettings) -> float:
    """Seconds one request may take: its whole limit at the slowest acceptable rate, and its prompt before that."""
    return DEADLINE_FLOOR_S + prompt_tokens / PREFILL_TOK_S + max_tokens / settings.min_tok_s


def room_for(context_tokens: int | None, prompt_tokens: int) -> int | None:
    """The largest max_tokens that fits; zero or less: the prompt never fits. None where the window is not known."""
    return None if context_tokens is None else context_tokens - prompt_tokens - MARGIN_TOKENS
