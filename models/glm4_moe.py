"""GLM-4.5 and 4.6 (arXiv 2508.06471): Llama with experts behind the first layers, and half of each head turning."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import read_flag, read_sizes, write_sizes
from kvjax.models.experts import GroupedExpertsConfig, read_groups, sigmoid_network, write_groups
from kvjax.models.family import Family
from kvjax.models.llama import Llama
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class Glm4MoeConfig(GroupedExpertsConfig):
    """A decoder of GLM-4.5 or 4.6."""


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {**_DEFAULTS, **raw}
    sizes = read_sizes(raw, eps=1e-5)
    return {
        **sizes,
        **read_groups(raw, sizes["num_layers"]),
        "rope": Rope.from_hugging_face(raw, sizes["max_position"], head_dim=sizes["head_dim"], partial=True),
        "qkv_bias": read_flag(raw, "attention_bias"),
        "qk_norm": read_flag(raw, "use_qk_norm"),
    }


def _write(config: Glm4MoeConfig) -> dict[str, Any]:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **write_sizes(config),
        **write_groups(config),
        **config.rope.to_hugging_face(),
        "partial_rotary_factor": config.rope.turning(config.head_dim) / config.head_dim,
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm,
    }


# What transformers' config class assumes where a config.json is silent.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
FAMILY = Family(
    {"Glm4MoeForCausalLM": "glm4_moe"},
    Glm4MoeConfig,
    lambda config: Llama(config, sigmoid_network),
    _read,
    _write,
    stacked="experts",
    further=True,
    float32=("e_score_correction_bias",),
)
