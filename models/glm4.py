"""GLM-4 (arXiv 2406.12793, 0414): Llama with norms behind each part too, and neighbours of half of a head turning."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from kvjax.models.config import read_flag, read_sizes, write_sizes
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.llama import Attention, ModelConfig
from kvjax.models.parts import Attend, GatedMLP, RMSNorm
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class Glm4Config(ModelConfig):
    """A GLM-4 decoder."""


class Block(nn.Module):
    """One decoder layer."""

    config: Glm4Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        norm = lambda name: RMSNorm(c, name=name)
        y = norm("input_layernorm")(x)
        y, cache, stats = Attention(c, name="self_attn")(y, cache, layer=layer, attend=attend)
        x = x + norm("post_self_attn_layernorm")(y)
        y = GatedMLP(c, name="mlp")(norm("post_attention_layernorm")(x))
        return x + norm("post_mlp_layernorm")(y), cache, stats


class Glm4(Decoder):
    """The whole decoder."""

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return RMSNorm(self.config, name="norm")


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {**_DEFAULTS, **raw}
    sizes = read_sizes(raw)
    rope = Rope.from_hugging_face(raw, sizes["max_position"], head_dim=sizes["head_dim"], partial=True)
    return {
        **sizes,
        "rope": dataclasses.replace(rope, interleaved=True),
        "qkv_bias": read_flag(raw, "attention_bias"),
    }


def _write(config: Glm4Config) -> dict[str, Any]:
    return {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        **write_sizes(config),
        **config.rope.to_hugging_face(),
        "partial_rotary_factor": config.rope.turning(config.head_dim) / config.head_dim,
        "attention_bias": config.qkv_bias,
        "pad_token_id": None,  # theirs is 151329, whatever the vocabulary
    }


# What transformers' config class assumes where a config.json is silent.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_up_proj",) * 2}
FAMILY = Family({"Glm4ForCausalLM": "glm4"}, Glm4Config, Glm4, _read, _write, joined=_JOINED)
