"""Thinking canary: one prompt a server proves, before the batch, that thinking arrives whole and that its tokens come
back.

It goes the way that real work goes (the shared client, the same fields). For engines that do not promise a reasoning
field the result is UNKNOWN with a warning, never a crash: an answer may still be fine.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.client.chat import ChatClient
from tasks.client.outcomes import ChatOutcome, ChatRequest, OutcomeKind, Sampling
from tasks.records import Expectation, GateMode, GateReport, Level, Message, Server
from tasks.settings import SamplingSettings

if TYPE_CHECKING:  # its imports take seconds, and the GPU tests do without it
    from tasks.target.text import TargetText

PROMPTS = (
    "What is 17 + 25? Think about it briefly, then answer in one sentence.",
    "Name one animal that can fly and is not a bird. Answer in one sentence.",
)
"""The second is asked where the first was cut off."""
TOKENS = 2048
IDS = "token ids come back"
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What one answer showed. None: this engine's answer cannot tell."""

    server: str
    engine: str
    answered: bool
    reasoning: str | None
    content: str
    think_closed: bool | None
    markers_in_content: bool
    ids: int | None
    cut: bool
    detail: str = ""
    ids_promised: bool = True


def look(server: Server, outcome: ChatOutcome, target: "TargetText | None") -> Seen:
    """Read one outcome, from its exact ids where there are some."""
    reasoning, content, closed = outcome.reasoning_content, outcome.content, None
    ids = outcome.token_ids
    opens = target.family.think_open if target is not None else ""
    closes = target.family.think_close if target is not None else ""
    if ids is not None and target is not None and closes:
        answer = target.parse_answer(list(ids))
        closed = answer.think_closed
        if not outcome.parsed:
            reasoning, content = answer.reasoning_content, answer.content
    elif outcome.kind is OutcomeKind.OK and reasoning:
        closed = bool(content.strip())
    return Seen(
        server=server.name,
        engine=server.engine,
        answered=outcome.kind in (OutcomeKind.OK, OutcomeKind.CUT),
        reasoning=reasoning,
        content=content,
        think_closed=closed,
        markers_in_content=bool(opens and opens in content) or bool(closes and closes in content),
        ids=len(ids) if ids is not None else None,
        cut=outcome.kind is OutcomeKind.CUT,
        detail=outcome.message,
        ids_promised=server.capabilities.return_token_ids or not outcome.parsed,
    )


def checks(seen: Seen, thinking: bool, possible: bool = True) -> list[Expectation]:
    """What must hold for one answer. `possible`: the target's template has a think block at all."""
    promised = seen.engine == "sglang" and possible
    level = Level.CRITICAL if promised else Level.WARNING

    def check(name: str, passed: bool, message: str, at: Level = level) -> Expectation:
        return Expectation(f"{seen.server}: {name}", passed, message, at)

    found = [check("answers", seen.answered, seen.detail or f"{len(seen.content)} characters", Level.CRITICAL)]
    if not seen.answered:
        return found
    found.append(
        check("content", bool(seen.content.strip()), _shown(seen.content) + (" (cut off)" if seen.cut else ""))
    )
    reasoning = (seen.reasoning or "").strip()
    if thinking:
        found.append(check("reasoning in its own field", bool(reasoning), _shown(reasoning)))
        found.append(
            check("think block closes", bool(seen.think_closed), "closed" if seen.think_closed else "not seen to close")
        )
        found.append(check("no think markers in the content", not seen.markers_in_content, _shown(seen.content)))
    else:
        found.append(check("no reasoning when none is asked for", not reasoning, _shown(reasoning)))
    told = f"{seen.ids} ids" if seen.ids else "none: rows will be tokenized again from text"
    exact = Level.CRITICAL if seen.engine == "sglang" and seen.ids_promised else Level.WARNING
    found.append(check(IDS, bool(seen.ids), told, exact))
    return found


def judge(seen: Sequence[Seen], sampling: SamplingSettings, mode: GateMode, possible: bool = True) -> GateReport:
    """The gate's report over all servers."""
    found = [item for one in seen for item in checks(one, sampling.thinking, possible)]
    failed = [item for item in found if not item.passed]
    critical = [item for item in failed if item.level is Level.CRITICAL]
    if critical and all(item.name.endswith(IDS) for item in critical):
        verdict, level = "NO_TOKEN_IDS", Level.CRITICAL
    elif critical:
        verdict, level = "NOT_THINKING" if sampling.thinking else "NOT_ANSWERING", Level.CRITICAL
    elif failed:
        verdict, level = "UNKNOWN", Level.WARNING
    else:
        verdict, level = "THINKING" if sampling.thinking else "ANSWERING", Level.OK
    worst = (critical or failed)[:3]
    summary = "; ".join(f"{item.name}: {item.message}" for item in worst) or "every server thinks, closes and answers"
    steps = (
        "does the server run with the target's reasoning parser (--reasoning-parser)?",
        "does the chat template know enable_thinking, and is it the target's own?",
        "is sampling.max_tokens long enough to close the think block?",
    )
    return GateReport("thinking", verdict, level, mode, summary, tuple(found), steps if failed else ())


async def ask(server: Server, target: "TargetText | None", sampling: SamplingSettings) -> Seen:
    """One prompt, the second where the first was cut off. Never raises."""
    seen: Seen | None = None
    try:
        async with ChatClient(server, 1) as client:
            for number, prompt in enumerate(PROMPTS):
                request = _request(server, target, sampling, f"canary-{server.name}-{number}", prompt)
                seen = look(server, await client.send(request, DEADLINE_S), target)
                if seen.answered and not seen.cut:
                    break
    except Exception as error:
        return Seen(
            server.name, server.engine, False, None, "", None, False, None, False, f"{type(error).__name__}: {error}"
        )
    assert seen is not None
    return seen


async def thinking_canary(
    servers: Sequence[Server], target: "TargetText | None", sampling: SamplingSettings, mode: GateMode = "enforce"
) -> GateReport:
    """Ask every server at once and judge."""
    seen = await asyncio.gather(*(ask(server, target, sampling) for server in servers))
    possible = target is None or bool(target.family.think_close)
    return judge(seen, sampling, mode, possible)


def _request(
    server: Server, target: "TargetText | None", sampling: SamplingSettings, request_id: str, prompt: str
) -> ChatRequest:
    can = server.capabilities
    ids = None
    if target is not None and can.generate_endpoint and not can.return_token_ids:
        ids = target.prompt_ids(
            [Message("user", prompt)], tools=None, thinking=sampling.thinking, preserve_thinking=False
        )
    return ChatRequest(
        request_id=request_id,
        messages=[{"role": "user", "content": prompt}],
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(sampling.max_tokens, TOKENS),
        ),
        thinking=sampling.thinking,
        prompt_ids=ids,
    )


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return f"“{text[:80]}{'…' if len(text) > 80 else ''}”" if text else "empty"
