"""What a checkpoint's own files say about its size: config.json, and the index or header of its weights.

Shapes follow transformers' configs of Qwen3.5/3.6 (hybrid: gated delta net and full attention), its MoE form and plain
decoder-only models. For Qwen3.6-27B the parameter count from config.json alone gives the published 55,562,855,904 bytes
and 849,398,784 of them for the MTP head, exactly.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import TargetError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CONV_BYTES = 2
"""The convolution window of a linear-attention layer is kept in bf16 (SGLANG_MAMBA_CONV_DTYPE)."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of one checkpoint. Bytes, as published; `mtp_weights` is None where the files do not tell."""

    model_type: str
    hidden: int
    vocab: int
    intermediate: int
    full_layers: int
    linear_layers: int
    kv_heads: int
    head_dim: int
    value_heads: int
    ssm_elements: int
    conv_channels: int
    conv_kernel: int
    ssm_bytes: int
    element_bytes: int
    max_position: int
    vision: bool
    mtp_layers: int
    mtp_weights: bool | None
    weight_bytes: int
    mtp_bytes: int
    embedding_bytes: int
    halved_by_fp8: int
    source: str

    @property
    def target_bytes(self) -> int:
        """Weights without the MTP head."""
        return self.weight_bytes - self.mtp_bytes

    @property
    def draft_copies_bytes(self) -> int:
        """Embedding and output head that the draft loads before they are shared with the target's."""
        return 2 * self.embedding_bytes if self.mtp_layers else 0

    def ssm_state_bytes(self, ssm_bytes: int | None = None, tp: int = 1) -> int:
        """Recurrent state of one request on one GPU."""
        return self.linear_layers * (self.ssm_elements // tp) * (ssm_bytes or self.ssm_bytes)

    def conv_column_bytes(self, tp: int = 1) -> int:
        """One position of the convolution windows of all linear layers."""
        return self.linear_layers * (self.conv_channels // tp) * CONV_BYTES

    def state_bytes(self, ssm_bytes: int | None = None, tp: int = 1) -> int:
        """State and convolution window of one request (Qwen3.6-27B: 153,944,064 in fp32)."""
        return self.ssm_state_bytes(ssm_bytes, tp) + (self.conv_kernel - 1) * self.conv_column_bytes(tp)

    def kv_bytes_per_token(self, element_bytes: int = 2, tp: int = 1) -> int:
        """Keys and values of the full-attention layers (Qwen3.6-27B: 65,536)."""
        return self.full_layers * self._kv_layer(element_bytes, tp)

    def draft_kv_bytes_per_token(self, element_bytes: int = 2, tp: int = 1) -> int:
        """Keys and values of the MTP layer (Qwen3.6-27B: 4,096)."""
        return self.mtp_layers * self._kv_layer(element_bytes, tp)

    def _kv_layer(self, element_bytes: int, tp: int) -> int:
        return max(1, self.kv_heads // tp) * self.head_dim * 2 * element_bytes

    def splits(self, tp: int) -> bool:
        """Whether the heads divide over `tp` GPUs."""
        heads = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        return heads and self.value_heads % tp == 0


def read_model(path: Path) -> Model:
    """Read a checkpoint directory, or a single config.json beside which the weights' index may lie.

    Raises TargetError when there is no readable config.json.
    """
    file = path if path.is_file() else path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TargetError(
            f"cannot read the model config {file}: {error}; name a checkpoint folder or its config.json"
        ) from error
    if not isinstance(config, dict) or not (config.get("text_config") or config).get("num_hidden_layers"):
        raise TargetError(f"{file} has no num_hidden_layers: expected the config.json of a transformers model")
    return parse_model(config, read_weights(file.parent), str(file))


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """What the files say: total bytes, bytes of `mtp.*` where known, and how many `mtp.*` tensors there are."""

    total_bytes: int
    mtp_tensors: int
    mtp_bytes: int | None = None


def read_weights(folder: Path) -> WeightFiles | None:
    """The safetensors index, or the header of a single safetensors file; None where neither lies there."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    try:
        if index.exists():
            value = json.loads(index.read_text(encoding="utf-8"))
            names = value.get("weight_map", {})
            total = int(value.get("metadata", {}).get("total_size", 0))
            return WeightFiles(total, sum(_is_mtp(name) for name in names)) if total else None
        if single.exists():
            return _read_header(single)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise TargetError(f"cannot read the weights' index in {folder}: {error}; fetch the checkpoint again") from error
    return None


def _read_header(path: Path) -> WeightFiles:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    sizes = {name: t["data_offsets"][1] - t["data_offsets"][0] for name, t in header.items() if name != "__metadata__"}
    mtp = [size for name, size in sizes.items() if _is_mtp(name)]
    return WeightFiles(sum(sizes.values()), len(mtp), sum(mtp))


def _is_mtp(name: str) -> bool:
    return name.startswith("mtp.") or ".mtp." in name


def parse_model(config: Mapping[str, Any], weights: WeightFiles | None = None, source: str = "config.json") -> Model:
    """Sizes from a config; weights come from the files where known, else from the parameter count."""
    text: Mapping[str, Any] = config.get("text_config") or config
    layers = int(text["num_hidden_layers"])
    kinds = list(text.get("layer_types") or [])
    linear = sum(kind == "linear_attention" for kind in kinds)
    head_dim = int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
    value_heads, key_heads = int(text.get("linear_num_value_heads", 0)), int(text.get("linear_num_key_heads", 0))
    value_dim, key_dim = int(text.get("linear_value_head_dim", 0)), int(text.get("linear_key_head_dim", 0))
    mtp_layers = int(text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers") or 0)
    element = DTYPE_BYTES.get(str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype")), 2)
    counted = count_parameters(config)
    total = weights.total_bytes if weights else counted.total * element
    mtp_bytes = counted.mtp * element
    has_mtp: bool | None = None
    if weights is not None:
        has_mtp = weights.mtp_tensors > 0
        mtp_bytes = weights.mtp_bytes if weights.mtp_bytes is not None else (mtp_bytes if has_mtp else 0)
    elif not mtp_layers:
        has_mtp = False
    already_small = "quantization_config" in config or "quantization_config" in text
    return Model(
        model_type=str(config.get("model_type", "")),
        hidden=int(text["hidden_size"]),
        vocab=int(text["vocab_size"]),
        intermediate=int(text.get("intermediate_size") or text.get("moe_intermediate_size") or 4 * text["hidden_size"]),
        full_layers=layers - linear,
        linear_layers=linear,
        kv_heads=int(text.get("num_key_value_heads") or text["num_attention_heads"]),
        head_dim=head_dim,
        value_heads=value_heads,
        ssm_elements=value_heads * value_dim * key_dim,
        conv_channels=value_heads * value_dim + 2 * key_heads * key_dim,
        conv_kernel=int(text.get("linear_conv_kernel_dim", 1)),
        ssm_bytes=DTYPE_BYTES.get(str(text.get("mamba_ssm_dtype")), 4),
        element_bytes=element,
        max_position=int(text.get("max_position_embeddings", 32_768)),
        vision="vision_config" in config,
        mtp_layers=mtp_layers,
        mtp_weights=has_mtp,
        weight_bytes=total,
        mtp_bytes=mtp_bytes,
        embedding_bytes=counted.embedding * element,
        halved_by_fp8=0 if already_small else counted.linear * element,
        source=source,
    )


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts of weights; `linear` are those that FP8 checkpoints store in one byte."""

    total: int
    mtp: int
    embedding: int
    linear: int


def count_parameters(config: Mapping[str, Any]) -> Parameters:
    """Parameter count of the text model, its MTP head and its vision tower."""
    text: Mapping[str, Any] = config.get("text_config") or config
    hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
    linear_layers = sum(kind == "linear_attention" for kind in text.get("layer_types") or [])
    mlp, attention, delta = _mlp(text), _attention(text), _delta_net(text)
    blocks = layers * (mlp + 2 * hidden) + (layers - linear_layers) * attention + linear_layers * delta
    embedding = int(text["vocab_size"]) * hidden
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    depth = int(text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers") or 0)
    mtp = 2 * hidden * hidden + depth * (attention + mlp + 2 * hidden) + 3 * hidden if depth else 0
    total = blocks + hidden + embedding * (1 if tied else 2) + mtp + _vision(config.get("vision_config"))
    return Parameters(total, mtp, embedding, blocks)


def _mlp(text: Mapping[str, Any]) -> int:
    hidden = int(text["hidden_size"])
    experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
    if not experts:
        return 3 * hidden * int(text["intermediate_size"])
    width = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    shared = int(text.get("shared_expert_intermediate_size") or 0)
    return experts * 3 * hidden * width + experts * hidden + 3 * hidden * shared + (hidden if shared else 0)


def _attention(text: Mapping[str, Any]) -> int:
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or hidden // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    query = heads * head_dim * (2 if text.get("attn_output_gate") else 1)
    return hidden * query + 2 * hidden * kv_heads * head_dim + heads * head_dim * hidden + 2 * head_dim


def _delta_net(text: Mapping[str, Any]) -> int:
    heads = int(text.get("linear_num_value_heads", 0))
    if not heads:
        return 0
    hidden, values = int(text["hidden_size"]), heads * int(text["linear_value_head_dim"])
    mixed = values + 2 * int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"])
    kernel = int(text["linear_conv_kernel_dim"])
    projections = hidden * (mixed + values + 2 * heads) + values * hidden
    return projections + mixed * kernel + 2 * heads + int(text["linear_value_head_dim"])


def _vision(vision: Mapping[str, Any] | None) -> int:
    if not vision or "depth" not in vision:
        return 0
    width, inner = int(vision["hidden_size"]), int(vision.get("intermediate_size", 0))
    block = 4 * width * width + 4 * width + 2 * width * inner + inner + width + 4 * width
    patch = (
        int(vision.get("in_channels", 3)) * int(vision.get("temporal_patch_size", 2)) * int(vision["patch_size"]) ** 2
    )
    merged = width * int(vision.get("spatial_merge_size", 2)) ** 2
    out = int(vision.get("out_hidden_size", width))
    merger = 2 * width + merged * merged + merged + merged * out + out
    return (
        int(vision["depth"]) * block
        + patch * width
        + width
        + int(vision.get("num_position_embeddings", 0)) * width
        + merger
    )
