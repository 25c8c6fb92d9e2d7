"""MPT: ALiBi (arXiv 2108.12409) in place of positions in embeddings or keys, and no biases of its own.

A key's logits fall with its distance from the row, by a slope of each query head. Keys are stored without a position:
the bias is added when they are read, at the positions of the policy's `Layout`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.contract import Rotate
from kvjax.contract.checks import positive, whole
from kvjax.models.config import DecoderConfig, check_only, read_cap, read_sizes, renamed, unturned, write_sizes
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.parts import MLP, Attend, LayerNorm, attended, heads
from kvjax.pallas_kernels import Logits


@dataclasses.dataclass(frozen=True)
class MPTConfig(DecoderConfig):
    """A decoder of the MPT family; `rope` is not read.

    Attributes:
      steepest: the smallest slope is 2 to the power of minus this (`alibi_bias_max`).
      clip: queries, keys and values lie within plus and minus this, None for any.
      scale: factor on `q . k`, the usual one if None.
    """

    steepest: float = 8.0
    clip: float | None = None
    scale: float | None = None

    def __post_init__(self):
        super().__post_init__()
        heads = self.num_query_heads, self.num_kv_heads
        if self.head_dim * heads[0] != self.embed_dim or heads[0] != heads[1]:
            raise ValueError(
                f"{heads[0]} query heads and {heads[1]} kv heads of {self.head_dim} channels do not fit one projection "
                f"of embed_dim={self.embed_dim}; heads share it equally, and each has keys of its own"
            )
        for name in ("steepest", "clip", "scale"):
            value = getattr(self, name)
            if name == "steepest" or value is not None:
                object.__setattr__(self, name, positive(name, value))

    @property
    def additive_rotation(self) -> bool:
        """True: keys are not turned at all."""
        return True

    def rotation(self, layer: int) -> Rotate:
        """Queries and keys as they are."""
        del layer
        return unturned

    @property
    def slopes(self) -> tuple[float, ...]:
        """ALiBi's slopes: powers of two in even steps; of another number of heads, every other one comes first."""
        n = 1 << (self.num_query_heads - 1).bit_length()
        slopes = [2.0 ** (-self.steepest * i / n) for i in range(1, n + 1)]
        return tuple(slopes if n == self.num_query_heads else [*slopes[1::2], *slopes[::2]][: self.num_query_heads])


class Attention(nn.Module):
    """Self-attention over a cache, with one projection for queries, keys and values."""

    config: MPTConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        q, k, v = heads(c, x, False, c.clip)
        logits = Logits(c.scale, slopes=jnp.asarray(c.slopes, jnp.float32))
        how = {"attend": attend, "layer": layer, "logits": logits}
        return attended(self, x, q, k, v, cache, out="out_proj", bias=False, **how)


class Block(nn.Module):
    """One decoder layer."""

    config: MPTConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        first, second = (LayerNorm(c, use_bias=False, name=name) for name in ("norm_1", "norm_2"))
        y, cache, stats = Attention(c, name="attn")(first(x), cache, layer=layer, attend=attend)
        x = x + y
        return x + MLP(c, ("up_proj", "down_proj"), bias=False, name="ffn")(second(x)), cache, stats


class MPT(Decoder):
    """The whole decoder."""

    words = "wte"
    layers = "blocks"

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return LayerNorm(self.config, use_bias=False, name="norm_f")


_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
_UNUSED = ("num_key_value_heads", "head_dim", "hidden_act", "intermediate_size")
_ONLY = {
    "no_bias": (True,),
    "logit_scale": (None,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
}
_ONLY_OF_ATTENTION = {
    "alibi": (True,),
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "qk_gn": (False,),
    "rope": (False,),
}


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    attention = raw.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        raise ValueError(f"attn_config={attention!r} is not an object of names and values")
    check_only(raw, _ONLY)
    check_only(attention, _ONLY_OF_ATTENTION, "attn_config.")
    raw = {"tie_word_embeddings": True, **{k: x for k, x in raw.items() if k not in _UNUSED}}
    raw = renamed(raw, _KEYS)
    if "hidden_size" in raw:
        wide = whole("expansion_ratio", raw.get("expansion_ratio", 4))
        raw["intermediate_size"] = wide * whole("d_model", raw["hidden_size"])
    sizes = read_sizes(raw | {"hidden_act": "gelu"}, norm="layer_norm_epsilon", eps=1e-5)
    return {
        **sizes,
        "steepest": positive("attn_config.alibi_bias_max", attention.get("alibi_bias_max", 8)),
        "clip": read_cap(attention, "clip_qkv"),
        "scale": read_cap(attention, "softmax_scale"),
    }


def _write(config: MPTConfig) -> dict[str, Any]:
    raw = write_sizes(config, norm="layer_norm_epsilon")
    steepest = int(config.steepest) if config.steepest.is_integer() else config.steepest
    return {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        **{_KEYS.get(k, k): x for k, x in raw.items() if k not in _UNUSED},
        "expansion_ratio": max(1, config.mlp_dim // config.embed_dim),
        "no_bias": True,
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": steepest,
            "clip_qkv": config.clip,
            "softmax_scale": config.scale,
        },
    }


FAMILY = Family(
    {"MPTForCausalLM": "mpt", "MptForCausalLM": "mpt"},
    MPTConfig,
    MPT,
    _read,
    _write,
    prefix="transformer",
    layers="blocks",
    embedding="wte",
    joined={"qkv_proj": ("Wqkv",) * 3},
)
