"""Parts of decoders: norms, projections, feed-forward networks, attention over a cache that they are given.

Submodules are named like the checkpoint's tensors, so loading is a transliteration.

Letters: B batch, T tokens, N query heads, K kv heads, H head_dim, D embed_dim, F mlp_dim, V vocab_size.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.models.config import DecoderConfig

# (cache, q "B N T H", k "B K T H", v "B K T H", *, layer, rotate, ...) -> what rows read "B N T H", the cache, and more
Attend = Callable[..., tuple[Array, Any, Any]]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def dense(config: DecoderConfig, features: int, bias: bool, name: str) -> nn.Dense:
    """A projection to `features` channels, in the config's dtype."""
    dtype = jnp.dtype(config.dtype)
    return nn.Dense(features, use_bias=bias, dtype=dtype, param_dtype=dtype, name=name)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, in float32 whatever the input.

    Attributes:
      config: for its epsilon and dtype.
      offset: added to the stored scale (1 in Gemma, whose product is in float32 too).
    """

    config: DecoderConfig
    offset: float | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalises the last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.dtype(self.config.dtype))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.config.norm_eps)
        if self.offset is not None:
            return (y * jnp.broadcast_to(self.offset + scale.astype(jnp.float32), x.shape)).astype(x.dtype)
        return y.astype(x.dtype) * jnp.broadcast_to(scale, x.shape)


class LayerNorm(nn.Module):
    """Layer normalisation with a scale and, mostly, a bias; the moments are those of float32."""

    config: DecoderConfig
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalises the last axis."""
        dtype = jnp.dtype(self.config.dtype)
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), dtype)
        y = x.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.config.norm_eps)
        y = y * jnp.broadcast_to(scale.astype(jnp.float32), x.shape)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), dtype)
            y = y + jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
        return y.astype(x.dtype)


class MLP(nn.Module):
    """Two projections with an activation between them.

    Attributes:
      config: sizes, dtype and the activation.
      names: of the projections up and down.
      bias: whether they have one.
    """

    config: DecoderConfig
    names: tuple[str, str]
    bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The projection of the activated projection."""
        c, (up, down) = self.config, self.names
        return dense(c, c.embed_dim, self.bias, down)(ACTIVATIONS[c.activation](dense(c, c.mlp_dim, self.bias, up)(x)))


class GatedMLP(nn.Module):
    """A feed-forward network with a gate (arXiv 2002.05202)."""

    config: DecoderConfig
    bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The gated sum."""
        c = self.config
        gate = ACTIVATIONS[c.activation](dense(c, c.mlp_dim, self.bias, "gate_proj")(x))
        return dense(c, c.embed_dim, self.bias, "down_proj")(gate * dense(c, c.mlp_dim, self.bias, "up_proj")(x))


def split(x: Float[Array, "B T _"], num_heads: int) -> Float[Array, "B _ T H"]:
    """The heads of a projection."""
    B, T, width = x.shape
    return x.reshape(B, T, num_heads, width // num_heads).transpose(0, 2, 1, 3)


def attended(
    module: nn.Module,
    x: Float[Array, "B T D"],
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    cache: Any,
    *,
    attend: Attend,
    layer: int,
    out: str,
    bias: bool,
    **options: Any,
) -> tuple[Float[Array, "B T D"], Any, Any]:
    """Attention, projected by the submodule `out`; the cache after the step; what else `attend` gave.

    Args:
      module: the attention in whose compact method this is called; its `config` has the sizes.
      x: what the module reads, for policies that look at hidden states.
      q, k, v: heads before rotation.
      cache, attend, layer: as the module was given them.
      out: the name of the output projection.
      bias: whether it has one.
      options: of `attend`: scale, softcap.
    """
    c: DecoderConfig = module.config  # pyrefly: ignore[missing-attribute]
    out_proj = None
    if not module.is_initializing():
        kernel = module.variables["params"][out]["kernel"]
        out_proj = kernel.reshape(c.num_query_heads, c.head_dim, c.embed_dim)
    options |= {"rotate": c.rotation(layer), "window": c.window(layer)}
    y, cache, stats = attend(cache, q, k, v, layer=layer, out_proj=out_proj, hidden=x, **options)
    B, _, T, _ = y.shape
    y = y.transpose(0, 2, 1, 3).reshape(B, T, c.num_query_heads * c.head_dim)
    return dense(c, c.embed_dim, bias, out)(y), cache, stats


def embedding(module: nn.Module, name: str, rows: int, width: int | None = None) -> Float[Array, "V _"]:
    """A table of vectors of embed_dim channels, or of `width`, one a token or a position."""
    c: DecoderConfig = module.config  # pyrefly: ignore[missing-attribute]
    shape = rows, c.embed_dim if width is None else width
    return module.param(name, nn.initializers.normal(0.02), shape, jnp.dtype(c.dtype))


def embedded(table: Float[Array, "V E"], tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """The vectors of tokens. A bad id must not look like a good one: beyond the table or below 0 it is NaN."""
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
