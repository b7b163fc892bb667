"""What a simulated model says: lengths, words, and the damage a fault does to an answer."""

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.codec import WORDS, Codec
from simulator.faults import RequestFault
from simulator.settings import SimSettings


@dataclass(slots=True)
class Script:
    """One planned answer. `work` is the tokens the server will spend on it."""

    reasoning: str | None
    content: str
    calls: list[dict[str, Any]] | None
    prompt_ids: list[int]
    ids: list[int]
    finish: str
    work: int
    fault: RequestFault | None = None
    usage_tokens: int = 0
    verify_ct: int = 0
    meta: dict[str, Any] = field(default_factory=dict)


def request_rng(settings: SimSettings, prompt: str, seed: int | None) -> random.Random:
    """Randomness of one request: a function of the server's seed, the prompt and (unless by prompt) its own seed."""
    own = "" if settings.length_by_prompt else str(seed)
    digest = hashlib.blake2b(f"{settings.seed}|{own}|{prompt}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "big"))


def draw_length(settings: SimSettings, rng: random.Random) -> int:
    """Log-normal answer length in tokens."""
    value = math.exp(rng.gauss(math.log(settings.median_tokens), settings.sigma))
    return max(settings.min_tokens, min(settings.max_tokens, round(value)))


def plan_answer(
    settings: SimSettings,
    codec: Codec,
    body: Mapping[str, Any],
    prompt_ids: list[int],
    thinking: bool,
    fault: RequestFault | None,
) -> Script:
    """The whole answer, before the server spends time on it."""
    prompt = json.dumps(body.get("messages") or body.get("input_ids"), sort_keys=True)
    rng = request_rng(settings, prompt, body.get("seed"))
    length = draw_length(settings, rng)
    limit = int(body.get("max_tokens") or 128)
    share = int(length * settings.think_share) if thinking else 0
    reasoning = " ".join(rng.choices(WORDS, k=max(1, share))) if thinking else None
    content = " ".join(rng.choices(WORDS, k=max(3, length - share - 3)))
    calls = _tool_calls(body, rng)
    if calls:
        content = ""
    reasoning, content = _damage(fault, reasoning, content, length, rng)
    ids = codec.answer_ids(reasoning, content, calls, thinking and fault != "no_thinking")
    finish = "tool_calls" if calls else "stop"
    if len(ids) > limit or fault == "cut":
        ids = ids[: min(limit, max(1, len(ids) // 2) if fault == "cut" else limit)]
        finish, calls = "length", None
        reasoning, content = _cut(codec, ids, thinking)
    script = Script(reasoning, content, calls, prompt_ids, ids, finish, len(ids), fault, len(ids))
    return _damage_ids(script, settings, rng)


def _tool_calls(body: Mapping[str, Any], rng: random.Random) -> list[dict[str, Any]] | None:
    """Calls the first tool when tools are offered and the last turn is the user's saying `call`."""
    messages = body.get("messages") or []
    if not body.get("tools") or not messages or messages[-1]["role"] != "user" or "call" not in messages[-1]["content"]:
        return None
    name = body["tools"][0]["function"]["name"]
    arguments = {"city": "Oslo"} if "same" in messages[-1]["content"] else {"city": rng.choice(WORDS)}
    call = {"name": name, "arguments": json.dumps(arguments)}
    return [{"id": f"call_{rng.getrandbits(32):08x}", "type": "function", "function": call}]


def _cut(codec: Codec, ids: Sequence[int], thinking: bool) -> tuple[str | None, str]:
    text = codec.decode(ids)
    if not thinking:
        return None, text
    before, closed, after = text.partition("</think>")
    return before.strip("\n"), after if closed else ""


def _damage(
    fault: RequestFault | None, reasoning: str | None, content: str, length: int, rng: random.Random
) -> tuple[str | None, str]:
    if fault == "empty":
        return reasoning, ""
    if fault == "no_thinking":
        return None, content
    if fault == "leaked_stop":
        return reasoning, f"{content}<|im_end|>\n<|im_start|>user\nmore"
    if fault == "tool_as_text":
        return reasoning, f'{content}\n<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>'
    if fault == "loop":
        return reasoning, " ".join(rng.choices(WORDS, k=5) * max(40, length // 5))
    if fault == "one_token":
        return reasoning, "! " * max(64, length)
    return reasoning, content


def _damage_ids(script: Script, settings: SimSettings, rng: random.Random) -> Script:
    if script.fault == "bad_ids" and len(script.ids) > 2:
        rng.shuffle(script.ids)
        script.ids = script.ids[:-1]
    if script.fault == "wrong_usage":
        script.usage_tokens = script.usage_tokens // 2 + 1
    if script.fault == "unclosed_think":
        script.reasoning = f"{script.reasoning or ''} {script.content}"
        script.content = ""
        script.ids = [index for index in script.ids if index != 4]
        script.usage_tokens = len(script.ids)
    if script.fault == "reasoning_in_content":
        script.content = f"{script.reasoning or ''}\n</think>\n\n{script.content}"
        script.reasoning = None
    if settings.accept_length:
        script.verify_ct = max(1, round(script.usage_tokens / (settings.accept_length + rng.uniform(-0.2, 0.2))))
    return script
