"""Qwen3-MoE: Qwen3 with experts in some layers (arXiv 2505.09388)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from kvjax.contract.checks import whole
from kvjax.models.config import each, read_flag, read_sizes, read_windows, write_sizes, write_windows
from kvjax.models.experts import Experts, ExpertsConfig
from kvjax.models.family import Family
from kvjax.models.llama import Llama
from kvjax.models.parts import GatedMLP
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(ExpertsConfig):
    """A Qwen3-MoE decoder."""


def network(config: Qwen3MoeConfig, layer: int) -> nn.Module:
    """The experts of a layer, or the one network of a dense layer."""
    if layer in config.dense_layers:
        return GatedMLP(config, name="mlp")
    return Experts(config, ("gate_proj", "up_proj", "down_proj"), name="mlp")


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {**_DEFAULTS, **{k: x for k, x in raw.items() if x is not None}}
    sizes = read_sizes(raw)
    layers, bias = range(sizes["num_layers"]), read_flag(raw, "attention_bias")
    raw.pop("layer_types", None)  # transformers gives all layers the window
    step = whole("decoder_sparse_step", raw["decoder_sparse_step"])
    alone = each("mlp_only_layers", raw["mlp_only_layers"], least=0)
    windows = read_windows(raw, ["sliding_attention"] * len(layers), used=read_flag(raw, "use_sliding_window"))
    return {
        **sizes,
        "rope": Rope.from_hugging_face(raw, sizes["max_position"]),
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "sliding_window": windows,
        "num_experts": whole("num_experts", raw.get("num_experts", raw.get("num_local_experts", 128))),
        "experts_per_token": whole("num_experts_per_tok", raw["num_experts_per_tok"]),
        "expert_dim": whole("moe_intermediate_size", raw["moe_intermediate_size"]),
        "normalized": read_flag(raw, "norm_topk_prob"),
        "dense_layers": tuple(i for i in layers if i in alone or (i + 1) % step),
    }


def _write(config: Qwen3MoeConfig) -> dict[str, Any]:
    windows = write_windows(config)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **write_sizes(config),
        **config.rope.to_hugging_face(),
        "attention_bias": config.qkv_bias,
        "use_sliding_window": windows["sliding_window"] is not None,
        "sliding_window": windows["sliding_window"],
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_dim,
        "norm_topk_prob": config.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
    }


# What transformers' config class assumes where a config.json is silent.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}
FAMILY = Family(
    {"Qwen3MoeForCausalLM": "qwen3_moe"},
    Qwen3MoeConfig,
    lambda config: Llama(config, network),
    _read,
    _write,
    stacked="experts",
)
