"""GPT-J: rotary embeddings of neighbouring channels in a part of each head, blocks whose two parts run in parallel."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from kvjax.contract.checks import whole
from kvjax.models.config import DecoderConfig, read_gpt_sizes, write_gpt_sizes
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.parts import MLP, Attend, LayerNorm, attended, heads
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class GPTJConfig(DecoderConfig):
    """A decoder of the GPT-J family."""


class Attention(nn.Module):
    """Self-attention over a cache, without biases."""

    config: GPTJConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        q, k, v = heads(c, x, False)
        return attended(self, x, q, k, v, cache, attend=attend, layer=layer, out="out_proj", bias=False)


class Block(nn.Module):
    """One decoder layer: both parts read the same normalised stream."""

    config: GPTJConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        y = LayerNorm(c, name="ln_1")(x)
        z, cache, stats = Attention(c, name="attn")(y, cache, layer=layer, attend=attend)
        return x + z + MLP(c, ("fc_in", "fc_out"), name="mlp")(y), cache, stats


class GPTJ(Decoder):
    """The whole decoder; its output head has a bias."""

    words = "wte"
    layers = "h"
    output_bias = True

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return LayerNorm(self.config, name="ln_f")


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {"rotary_dim": 64, **raw}
    sizes = read_gpt_sizes(raw)
    if sizes["tie_embeddings"]:
        raise ValueError("tie_word_embeddings=true is not supported for GPT-J, whose output head has a bias")
    channels = None if raw["rotary_dim"] is None else whole("rotary_dim", raw["rotary_dim"])
    return {**sizes, "rope": Rope(channels=channels, interleaved=True)}


def _write(config: GPTJConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        **write_gpt_sizes(config),
        "rotary_dim": config.rope.channels,
    }


FAMILY = Family(
    {"GPTJForCausalLM": "gptj"},
    GPTJConfig,
    GPTJ,
    _read,
    _write,
    prefix="transformer",
    layers="h",
    embedding="wte",
    ignored=("attn.bias", "attn.masked_bias"),
)
