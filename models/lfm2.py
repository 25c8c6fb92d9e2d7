"""LFM2 (arXiv 2511.23404): short convolutions, and grouped-query attention in some layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.contract import Positions
from kvjax.contract.checks import positive, whole
from kvjax.models.config import HybridConfig, read_flag, read_kinds, read_sizes, write_sizes
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.parts import Attend, GatedMLP, RMSNorm, attended, dense, heads
from kvjax.models.recurrent import Convolution
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class Lfm2Config(HybridConfig):
    """An LFM2 decoder.

    Attributes:
      taps: inputs of an output of a short convolution.
      conv_bias: whether they have biases.
    """

    taps: int = 3
    conv_bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "taps", whole("taps", self.taps))

    def own_state(self, layer: int, batch: int) -> Float[Array, "B W D"]:
        """The last inputs of a layer's convolution, before any token."""
        del layer
        return jnp.zeros((batch, self.taps - 1, self.embed_dim), self.dtype)


class Attention(nn.Module):
    """Grouped-query self-attention over a cache."""

    config: Lfm2Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        q, k, v = heads(c, x, False)
        q, k = RMSNorm(c, name="q_layernorm")(q), RMSNorm(c, name="k_layernorm")(k)
        return attended(self, x, q, k, v, cache, attend=attend, layer=layer, out="out_proj", bias=False)


class ShortConvolution(nn.Module):
    """A convolution between two gates."""

    config: Lfm2Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], state: Any, *, pos: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B W D"]]:
        """Output, and the last inputs after it."""
        c = self.config
        before, after, x = jnp.split(dense(c, 3 * c.embed_dim, c.conv_bias, "in_proj")(x), 3, axis=-1)
        last = c.own_state(0, len(x)) if state is None else state
        y, last = Convolution(c, c.embed_dim, c.taps, c.conv_bias, name="conv")(before * x, last, pos)
        return dense(c, c.embed_dim, c.conv_bias, "out_proj")(after * y.astype(x.dtype)), last


class Block(nn.Module):
    """One decoder layer."""

    config: Lfm2Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend | Positions
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c, stats = self.config, ()
        y = RMSNorm(c, name="operator_norm")(x)
        if isinstance(attend, Positions):
            y, cache = ShortConvolution(c, name="conv")(y, cache, pos=attend.pos)
        else:
            y, cache, stats = Attention(c, name="self_attn")(y, cache, layer=layer, attend=attend)
        x = x + y
        y = RMSNorm(c, name="ffn_norm")(x)
        return x + GatedMLP(c, down="w2", name="feed_forward")(y), cache, stats


class Lfm2(Decoder):
    """The whole decoder."""

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return RMSNorm(self.config, name="embedding_norm")


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {**_DEFAULTS, **raw, "hidden_act": "silu"}
    for older, key in (("tie_embedding", "tie_word_embeddings"), ("block_ff_dim", "intermediate_size")):
        raw[key] = raw.get(older, raw.get(key))
    sizes = read_sizes(raw, norm="norm_eps", eps=1e-5)
    layers = range(sizes["num_layers"])
    whole_ = raw.get("full_attn_idxs") or layers
    kinds = read_kinds(raw, ("conv", "full_attention"), ["full_attention" if i in whole_ else "conv" for i in layers])
    return {
        **sizes,
        "mlp_dim": _width(raw, sizes["mlp_dim"]),
        "rope": Rope.from_hugging_face(raw, sizes["max_position"]),
        "stateful_layers": tuple(i for i in layers if kinds[i] == "conv"),
        "taps": whole("conv_L_cache", raw["conv_L_cache"]),
        "conv_bias": read_flag(raw, "conv_bias"),
    }


def _width(raw: Mapping[str, Any], given: int) -> int:
    """The width of the feed-forward network: two thirds of the given one times a factor, rounded up, or that itself."""
    if not read_flag(raw, "block_auto_adjust_ff_dim", True):
        return given
    factor, multiple = raw.get("block_ffn_dim_multiplier", 1.0), whole("block_multiple_of", raw["block_multiple_of"])
    width = int(2 * given / 3)
    if factor is None:
        return width
    width = int(positive("block_ffn_dim_multiplier", factor) * width)
    return -(-width // multiple) * multiple


def _write(config: Lfm2Config) -> dict[str, Any]:
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        **write_sizes(config, norm="norm_eps"),
        **config.rope.to_hugging_face(),
        "layer_types": ["full_attention" if config.holds_kv(i) else "conv" for i in range(config.num_layers)],
        "conv_L_cache": config.taps,
        "conv_bias": config.conv_bias,
        "block_auto_adjust_ff_dim": False,
    }


# What transformers' config class assumes where a config.json is silent.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
}
FAMILY = Family(
    {"Lfm2ForCausalLM": "lfm2"},
    Lfm2Config,
    Lfm2,
    _read,
    _write,
    joined={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("w1", "w3")},
)
