"""Mixtral: Mistral with experts in every layer (arXiv 2401.04088)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from kvjax.contract.checks import whole
from kvjax.models.config import read_sizes, read_windows, write_sizes, write_windows
from kvjax.models.experts import Experts, ExpertsConfig
from kvjax.models.family import Family
from kvjax.models.llama import Llama
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class MixtralConfig(ExpertsConfig):
    """A Mixtral decoder."""


def experts(config: MixtralConfig, layer: int) -> nn.Module:
    """Those of a layer: every layer has some."""
    del layer
    return Experts(config, ("w1", "w3", "w2"), name="block_sparse_moe")


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {**_DEFAULTS, **raw}
    sizes = read_sizes(raw, eps=1e-5)
    return {
        **sizes,
        "rope": Rope.from_hugging_face(raw, sizes["max_position"]),
        "sliding_window": read_windows(raw, ["sliding_attention"] * sizes["num_layers"]),
        "num_experts": whole("num_local_experts", raw["num_local_experts"]),
        "experts_per_token": whole("num_experts_per_tok", raw["num_experts_per_tok"]),
        "expert_dim": sizes["mlp_dim"],
    }


def _write(config: MixtralConfig) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **write_sizes(config),
        **config.rope.to_hugging_face(),
        "sliding_window": write_windows(config)["sliding_window"],
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
    }


# What transformers' config class assumes where a config.json is silent.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
    "rope_theta": 1e6,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
FAMILY = Family(
    {"MixtralForCausalLM": "mixtral"},
    MixtralConfig,
    lambda config: Llama(config, experts),
    _read,
    _write,
    stacked="experts",
)
