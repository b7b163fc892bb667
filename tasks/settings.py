"""Settings that several stages share. Every other group lives in its room's own `settings.py`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base of every group: frozen, unknown fields refused (a typo must not silently mean the default)."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


Mode = Literal["enforce", "monitor"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class TargetSettings(Settings):
    """The model whose own words are wanted."""

    model: str = Field(title="Model", description="Local directory, Hugging Face id, or `embedded:smollm2`.")
    revision: str | None = Field(None, title="Revision", description="Commit of the model; recorded in the manifest.")
    tokenizer: str | None = Field(
        None, title="Tokenizer", description="Directory or id with tokenizer.json; default: beside the model."
    )
    chat_template: str | None = Field(
        None, title="Chat template", description="File to use instead of the tokenizer's own template."
    )
    family: str = Field(
        "auto", title="Template family", description="Markers and turn headers; `auto` finds it from the template."
    )
    families: dict[str, dict[str, str | list[str] | None]] = Field(
        default_factory=dict, title="More families", description="Own family descriptions, by name."
    )
    quantization: str | None = Field(None, title="Quantization", description="As the server names it, e.g. fp8.")
    state_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, title="State dtype", description="Recurrent state of hybrid models; empty: as the model's config says."
    )
    mtp: bool = Field(True, title="MTP wanted", description="Speculate with the checkpoint's own MTP head.")


class SamplingMix(Settings):
    """One arm of a weighted mix; fields left empty are those of the group."""

    weight: float = Field(gt=0, title="Weight", description="Relative share of prompts.")
    temperature: float | None = Field(None, ge=0, title="Temperature", description="For this arm.")
    thinking: bool | None = Field(None, title="Thinking", description="For this arm.")


class SamplingSettings(Settings):
    """How the target samples. Fields left empty come from the target's generation_config.json."""

    temperature: float | None = Field(None, ge=0, title="Temperature", description="Sampling temperature.")
    top_p: float | None = Field(None, gt=0, le=1, title="top_p", description="Nucleus mass.")
    top_k: int | None = Field(None, title="top_k", description="Candidates kept; -1 means all.")
    presence_penalty: float | None = Field(None, title="Presence penalty", description="Approximate under MTP.")
    max_tokens: int = Field(32_768, ge=1, title="Output limit", description="Tokens per answer, thinking included.")
    thinking: bool = Field(True, title="Thinking", description="Ask for thinking and require it.")
    preserve_thinking: bool = Field(
        False, title="Keep earlier thinking", description="Render the thinking of earlier turns (Qwen3.6 option)."
    )
    samples: int = Field(1, ge=1, le=64, title="Samples a prompt", description="Independent answers per prompt.")
    mix: tuple[SamplingMix, ...] = Field(
        (), title="Mix", description="Weighted arms, drawn as a function of the prompt id."
    )
    seed: int = Field(0, title="Seed", description="Mixed into per-request seeds; SGLang ignores them under EAGLE.")
