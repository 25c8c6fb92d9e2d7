"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373): partial rotary embeddings, blocks whose parts run in parallel."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from kvjax.models.config import DecoderConfig, read_flag, read_sizes, write_sizes
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.parts import MLP, Attend, LayerNorm, attended, heads
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class GPTNeoXConfig(DecoderConfig):
    """A decoder of the GPT-NeoX family.

    Attributes:
      attention_bias: whether the projections of attention have a bias.
      parallel: whether attention and feed-forward network read the same residual stream.
    """

    attention_bias: bool = True
    parallel: bool = True


class Attention(nn.Module):
    """Self-attention over a cache; the projection holds query, key and value of a head side by side."""

    config: GPTNeoXConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        q, k, v = heads(c, x, c.attention_bias)
        return attended(self, x, q, k, v, cache, attend=attend, layer=layer, out="dense", bias=c.attention_bias)


class Block(nn.Module):
    """One decoder layer."""

    config: GPTNeoXConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        y = LayerNorm(c, name="input_layernorm")(x)
        y, cache, stats = Attention(c, name="attention")(y, cache, layer=layer, attend=attend)
        read = x if c.parallel else x + y
        z = LayerNorm(c, name="post_attention_layernorm")(read)
        return x + y + MLP(c, ("dense_h_to_4h", "dense_4h_to_h"), name="mlp")(z), cache, stats


class GPTNeoX(Decoder):
    """The whole decoder."""

    words = "embed_in"
    output = "embed_out"

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return LayerNorm(self.config, name="final_layer_norm")


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    older = {"rope_theta": raw.get("rotary_emb_base", 10000.0), "partial_rotary_factor": raw.get("rotary_pct", 0.25)}
    raw = {"hidden_act": "gelu", **older, **raw, "num_key_value_heads": None, "head_dim": None}
    sizes = read_sizes(raw, norm="layer_norm_eps", eps=1e-5)
    rope = Rope.from_hugging_face(raw, sizes["max_position"], head_dim=sizes["head_dim"], partial=True)
    switches = {
        "attention_bias": read_flag(raw, "attention_bias", True),
        "parallel": read_flag(raw, "use_parallel_residual", True),
    }
    return {**sizes, "rope": rope, **switches}


def _write(config: GPTNeoXConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        **write_sizes(config, norm="layer_norm_eps"),
        **config.rope.to_hugging_face(),
        "partial_rotary_factor": config.rope.turning(config.head_dim) / config.head_dim,
        "rotary_pct": config.rope.turning(config.head_dim) / config.head_dim,
        "attention_bias": config.attention_bias,
        "use_parallel_residual": config.parallel,
    }


FAMILY = Family(
    {"GPTNeoXForCausalLM": "gpt_neox"},
    GPTNeoXConfig,
    GPTNeoX,
    _read,
    _write,
    prefix="gpt_neox",
    embedding="embed_in",
    head="embed_out",
    ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    joined={"qkv_proj": ("query_key_value",)},
)
