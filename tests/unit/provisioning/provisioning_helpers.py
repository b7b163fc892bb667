"""Shapes of the models in these tests, and a stand-in for SGLang's interpreter."""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from tasks.provisioning.model_config import Model, WeightFiles, parse_model
from tasks.records import GpuFacts

GIB = 1 << 30
CONFIG_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": {
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "head_dim": 256,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(64)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "vocab_size": 248320,
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_position_embeddings": 2304,
        "out_hidden_size": 5120,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
"""Numbers of Qwen3.6-27B's published config.json."""

CONFIG_DENSE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def model_27b(mtp_tensors: int | None = None) -> Model:
    """The 27B model; `mtp_tensors` as its weights' index would say."""
    weights = None if mtp_tensors is None else WeightFiles(55_562_855_904, mtp_tensors)
    return parse_model(CONFIG_27B, weights)


def fake_gpu(index: int = 0, free_gib: float = 139.13) -> GpuFacts:
    """An H200 as its driver reports it."""
    return GpuFacts(index, f"GPU-fake-{os.getpid()}-{index}", 143_771 << 20, int(free_gib * GIB), "NVIDIA H200")


def write_model(folder: Path, config: dict[str, Any] = CONFIG_27B, mtp: bool = True) -> Path:
    """A checkpoint folder with config and index, no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = ["model.embed_tokens.weight", *([f"mtp.layers.0.{i}" for i in range(15)] if mtp else [])]
    index = {"metadata": {"total_size": 55_562_855_904}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_interpreter(folder: Path, behaviours: list[dict[str, Any]], version: str = "0.5.17") -> Path:
    """An executable that answers like `python` of an environment with SGLang. Start n behaves as `behaviours[n]`,
    later ones as the last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "behaviours.json").write_text(json.dumps(behaviours))
    (folder / "version").write_text(version)
    path = folder / "python"
    script = Path(__file__).with_name("fake_sglang.py")
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "{folder}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
