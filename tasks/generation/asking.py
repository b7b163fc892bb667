"""From a job to a request, and from a judged answer to what is journalled. Pure but for the tokenizer."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.client.chat import ChatOutcome, ChatRequest, Sampling
from tasks.generation.conversation import next_step, to_server
from tasks.generation.jobs import Job
from tasks.generation.policy import deadline_s, room_for
from tasks.generation.prompts import tools_of
from tasks.generation.quality import Judged
from tasks.generation.sampling import request_id, seed_of
from tasks.generation.settings import GenerationSettings
from tasks.records import Message, Server
from tasks.settings import SamplingSettings

TOKENIZE_IN_THREAD = 4096  # characters; shorter prompts cost less than handing them over


@dataclass(frozen=True, slots=True)
class Question:
    """A request ready to send. `room` is the largest limit that fits the window; None where it is not known."""

    request: ChatRequest
    deadline_s: float
    room: int | None


class DoesNotFit(Exception):
    """The prompt leaves no room for an answer; found before sending."""


class Asker:
    """Builds questions. Raises DoesNotFit, or ValueError for a prompt that cannot be rendered or parsed."""

    def __init__(self, target: Any, sampling: SamplingSettings, settings: GenerationSettings) -> None:
        self._target, self._sampling, self._settings = target, sampling, settings
        self._reasoning_field = getattr(target.family, "reasoning_field", "") or "reasoning_content"

    async def ask(self, job: Job, server: Server) -> Question:
        """Clamp max_tokens to the window from a local token count, so that an overflow is never sent."""
        history = next_step(job.prompt.messages, job.answers, self._settings.turn_policy).history
        messages = [to_server(message, self._reasoning_field) for message in history]
        tools = tools_of(job.prompt)
        wanted = job.max_tokens or self._sampling.max_tokens
        size = sum(len(m.content) + len(m.reasoning_content or "") + len(m.tool_calls or "") for m in history)
        size += len(job.prompt.tools or "")
        ids = await self._ids(job, server, history, size, wanted)
        tokens = len(ids) if ids is not None else math.ceil(size / 3)
        room = room_for(server.context_tokens, len(ids)) if ids is not None else None
        if room is not None and room < 1:
            raise DoesNotFit(f"{tokens} prompt tokens in a window of {server.context_tokens}")
        limit = wanted if room is None else min(wanted, room)
        arm, prompt = job.arm, job.prompt
        request = ChatRequest(
            request_id(prompt.prompt_id, prompt.sample_index, job.turn, job.attempt, job.requeues),
            messages,
            Sampling(
                arm.temperature,
                arm.top_p,
                arm.top_k,
                arm.presence_penalty,
                limit,
                seed_of(self._sampling.seed, prompt.prompt_id, prompt.sample_index, job.turn, job.attempt),
            ),
            tools,
            arm.thinking,
            self._sampling.preserve_thinking,
            ids,
        )
        return Question(request, deadline_s(limit, tokens, self._settings), room)

    async def _ids(
        self, job: Job, server: Server, history: Sequence[Message], size: int, wanted: int
    ) -> list[int] | None:
        """Prompt ids where they decide something: for /generate, and where the window might be too small.

        A token is at least one byte of UTF-8 and a character at most four, so most prompts need no counting.
        """
        can = server.capabilities
        needed = can.generate_endpoint and not can.return_token_ids
        window = server.context_tokens
        if not needed and (window is None or size * 4 + 64 * (len(history) + 4) + wanted <= window):
            return None

        def count() -> list[int]:
            ids = self._target.prompt_ids(
                history,
                tools=job.prompt.tools,
                thinking=job.arm.thinking,
                preserve_thinking=self._sampling.preserve_thinking,
            )
            return list(ids)

        return _plainly(count) if size < TOKENIZE_IN_THREAD else await asyncio.to_thread(_plainly, count)


def _plainly(count: Callable[[], list[int]]) -> list[int]:
    """A template's refusal is the prompt's fault, whatever class it raises."""
    try:
        return count()
    except Exception as error:
        raise ValueError(f"the chat template refused the prompt: {error}") from error


def turn_record(job: Job, server: Server, question: Question, judged: Judged, cut: str | None) -> dict[str, Any]:
    """What the journal keeps of an accepted turn."""
    outcome, request = judged.outcome, question.request
    prompt_ids = outcome.prompt_token_ids
    return {
        "prompt_id": job.prompt.prompt_id,
        "turn": job.turn,
        "prompt_token_ids": prompt_ids if prompt_ids is not None else request.prompt_ids,
        "token_ids": outcome.token_ids,
        "content": outcome.content,
        "reasoning_content": outcome.reasoning_content,
        "tool_calls": outcome.tool_calls,
        "finish_reason": outcome.finish_reason,
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": completion_tokens(outcome),
        "ids_source": outcome.ids_source,
        "accept_length": outcome.accept_length,
        "latency_s": outcome.latency_s,
        "attempt": job.attempt,
        "server": server.name,
        "seed": request.sampling.seed,
        "max_tokens": request.sampling.max_tokens,
        "notes": list(judged.notes),
        "thinking": job.arm.thinking,
        "temperature": job.arm.temperature,
        "top_p": job.arm.top_p,
        "top_k": job.arm.top_k,
        "cut_reason": cut,
    }


def completion_tokens(outcome: ChatOutcome) -> int | None:
    """By usage, else by the ids."""
    if outcome.completion_tokens is not None:
        return outcome.completion_tokens
    return len(outcome.token_ids) if outcome.token_ids is not None else None


def attempt_record(
    job: Job, server: str, reason: str, detail: str, max_tokens: int | None, next_max_tokens: int | None
) -> dict[str, Any]:
    """One line of the attempt ledger."""
    return {
        "turn": job.turn,
        "attempt": job.attempt,
        "requeues": job.requeues,
        "reason": reason,
        "detail": detail[:300],
        "server": server,
        "max_tokens": max_tokens,
        "next_max_tokens": next_max_tokens,
    }
