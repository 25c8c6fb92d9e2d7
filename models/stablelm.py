"""StableLM (arXiv 2402.17834): rotary embeddings in a part of each head, LayerNorm, a gated MLP."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from kvjax.models.config import DecoderConfig, read_flag, read_sizes, write_sizes
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.parts import Attend, GatedMLP, LayerNorm, attended, heads
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class StableLMConfig(DecoderConfig):
    """A decoder of the StableLM family.

    Attributes:
      qkv_bias: whether the projections of queries, keys and values have a bias.
      qk_norm: LayerNorm over head_dim on queries and keys, before rotation, with a scale of its own for each head.
      parallel: whether attention and feed-forward network read the same normalised stream.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    parallel: bool = False


class HeadNorms(nn.Module):
    """Layer normalisation of heads without a bias, of each by a scale of its own."""

    config: StableLMConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B N T H"]) -> Float[Array, "B N T H"]:
        """Normalises the last axis."""
        own = nn.vmap(LayerNorm, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=1, out_axes=1)
        return own(self.config, use_bias=False, name="norms")(x)


class Attention(nn.Module):
    """Grouped-query self-attention over a cache."""

    config: StableLMConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        q, k, v = heads(c, x, c.qkv_bias)
        if c.qk_norm:
            q, k = HeadNorms(c, name="q_layernorm")(q), HeadNorms(c, name="k_layernorm")(k)
        return attended(self, x, q, k, v, cache, attend=attend, layer=layer, out="o_proj", bias=False)


class Block(nn.Module):
    """One decoder layer."""

    config: StableLMConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        y = LayerNorm(c, name="input_layernorm")(x)
        z, cache, stats = Attention(c, name="self_attn")(y, cache, layer=layer, attend=attend)
        x = x + z
        y = y if c.parallel else LayerNorm(c, name="post_attention_layernorm")(x)
        return x + GatedMLP(c, name="mlp")(y), cache, stats


class StableLM(Decoder):
    """The whole decoder."""

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return LayerNorm(self.config, name="norm")


# What transformers' config class assumes where a config.json is silent.
_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25}


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {**_DEFAULTS, **raw, "head_dim": None}
    sizes = read_sizes(raw, norm="layer_norm_eps", eps=1e-5)
    return {
        **sizes,
        "rope": Rope.from_hugging_face(raw, sizes["max_position"], head_dim=sizes["head_dim"], partial=True),
        "qkv_bias": read_flag(raw, "use_qkv_bias"),
        "qk_norm": read_flag(raw, "qk_layernorm"),
        "parallel": read_flag(raw, "use_parallel_residual"),
    }


def _write(config: StableLMConfig) -> dict[str, Any]:
    return {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        **write_sizes(config, norm="layer_norm_eps"),
        **config.rope.to_hugging_face(),
        "partial_rotary_factor": config.rope.turning(config.head_dim) / config.head_dim,
        "use_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "use_parallel_residual": config.parallel,
    }


FAMILY = Family({"StableLmForCausalLM": "stablelm"}, StableLMConfig, StableLM, _read, _write, stacked="norms")
