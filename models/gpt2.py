"""GPT-2 and Cerebras-GPT (arXiv 2304.03208): learned positions, projections that are stored with inputs first."""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.models.config import LearnedPositions, read_flag, read_gpt_sizes, write_gpt_sizes
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.parts import MLP, Attend, LayerNorm, attended, embedded, embedding, heads
from kvjax.pallas_kernels import Logits


@dataclasses.dataclass(frozen=True)
class GPT2Config(LearnedPositions):
    """A decoder of the GPT-2 family.

    Attributes:
      scaled: whether logits of attention are divided by the square root of head_dim.
      scaled_by_layer: whether they are divided by the number of the layer too, from 1.
    """

    scaled: bool = True
    scaled_by_layer: bool = False

    def kind(self, layer: int) -> Hashable:
        """Every layer is of its own kind where attention is scaled by its number."""
        return super().kind(layer), layer if self.scaled_by_layer else None


class Attention(nn.Module):
    """Self-attention over a cache, with one projection for queries, keys and values."""

    config: GPT2Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        q, k, v = heads(c, x, True)
        scale = (c.head_dim**-0.5 if c.scaled else 1.0) / (layer + 1 if c.scaled_by_layer else 1)
        how = {"attend": attend, "layer": layer, "logits": Logits(scale)}
        return attended(self, x, q, k, v, cache, out="c_proj", bias=True, **how)


class Block(nn.Module):
    """One decoder layer."""

    config: GPT2Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        y, cache, stats = Attention(c, name="attn")(LayerNorm(c, name="ln_1")(x), cache, layer=layer, attend=attend)
        x = x + y
        return x + MLP(c, ("c_fc", "c_proj"), name="mlp")(LayerNorm(c, name="ln_2")(x)), cache, stats


class GPT2(Decoder):
    """The whole decoder."""

    words = "wte"
    layers = "h"

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return LayerNorm(self.config, name="ln_f")

    def setup(self):
        """Makes the parts under the names of their parameters."""
        super().setup()
        self.places = embedding(self, "wpe", self.config.max_position)

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Vectors of tokens and positions."""
        return super().embed(tokens, positions) + embedded(self.places, jnp.maximum(positions, 0))  # padding has -1


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {"n_positions": 1024, "tie_word_embeddings": True, **raw}
    if read_flag(raw, "add_cross_attention"):
        raise ValueError("add_cross_attention=true is not supported; a decoder attends to its own tokens alone")
    switches = {
        "scaled": read_flag(raw, "scale_attn_weights", True),
        "scaled_by_layer": read_flag(raw, "scale_attn_by_inverse_layer_idx"),
    }
    return {**read_gpt_sizes(raw), **switches}


def _write(config: GPT2Config) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **write_gpt_sizes(config),
        "scale_attn_weights": config.scaled,
        "scale_attn_by_inverse_layer_idx": config.scaled_by_layer,
    }


FAMILY = Family(
    {"GPT2LMHeadModel": "gpt2"},
    GPT2Config,
    GPT2,
    _read,
    _write,
    prefix="transformer",
    layers="h",
    embedding="wte",
    ignored=("attn.bias", "attn.masked_bias"),
    conv1d=True,
    joined={"qkv_proj": ("c_attn",) * 3},
)
