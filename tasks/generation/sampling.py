"""What one request asks for: sampling as a function of the prompt id, seeds as a function of id, turn and attempt."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.settings import SamplingSettings


@dataclass(frozen=True, slots=True)
class Arm:
    """Resolved sampling of one prompt."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    presence_penalty: float | None
    thinking: bool


def _point(*parts: object) -> int:
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def seed_of(base: int, prompt_id: str, sample_index: int, turn: int, attempt: int) -> int:
    """31-bit seed. The same question after a resume, another one on each attempt."""
    return _point("seed", base, prompt_id, sample_index, turn, attempt) & 0x7FFFFFFF


def request_id(prompt_id: str, sample_index: int, turn: int, attempt: int, requeues: int) -> str:
    """32 characters: 30 name the question and its attempt, 2 count how often it was moved to another server (a server
    that is thought dead may still be working on the earlier one).
    """
    text = f"rid|{prompt_id}|{sample_index}|{turn}|{attempt}".encode()
    return f"{hashlib.blake2b(text, digest_size=15).hexdigest()}{min(requeues, 255):02x}"


class Sampler:
    """Draws each prompt's arm. Fields left empty in the settings come from the target's generation_config.json."""

    def __init__(self, settings: SamplingSettings, generation_config: Mapping[str, Any]) -> None:
        self._settings = settings
        defaults = {name: generation_config.get(name) for name in ("temperature", "top_p", "top_k")}
        if generation_config.get("do_sample") is False and settings.temperature is None:
            defaults["temperature"] = 0.0
        self._base = Arm(
            defaults["temperature"] if settings.temperature is None else settings.temperature,
            defaults["top_p"] if settings.top_p is None else settings.top_p,
            defaults["top_k"] if settings.top_k is None else settings.top_k,
            settings.presence_penalty,
            settings.thinking,
        )
        self._total = sum(arm.weight for arm in settings.mix)

    def arm(self, prompt_id: str) -> Arm:
        """The arm of one prompt: stable under resume, reordering and other prompts."""
        if not self._settings.mix:
            return self._base
        point = _point("mix", self._settings.seed, prompt_id) / 2**64 * self._total
        chosen = self._settings.mix[-1]
        for arm in self._settings.mix:
            if point < arm.weight:
                chosen = arm
                break
            point -= arm.weight
        base = self._base
        return Arm(
            base.temperature if chosen.temperature is None else chosen.temperature,
            base.top_p,
            base.top_k,
            base.presence_penalty,
            base.thinking if chosen.thinking is None else chosen.thinking,
        )
