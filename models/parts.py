"""Parts of decoders: norms, projections, feed-forward networks, attention over a cache that they are given.

Submodules are named like the checkpoint's tensors, so loading is a transliteration.

Letters: B batch, T tokens, N query heads, K kv heads, H head_dim, D embed_dim, F mlp_dim, V vocab_size.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.contract import Attend as Attend
from kvjax.models.config import DecoderConfig
from kvjax.pallas_kernels import Logits

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    """What numbers of a dtype are summed in: float32, or float64 for float64."""
    return dtype if dtype.itemsize > 4 else jnp.dtype(jnp.float32)


def activation(config: DecoderConfig, x: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """The config's activation, computed in float32 or wider and rounded once."""
    return _ACTIVATIONS[config.activation](x.astype(_wide(x.dtype))).astype(x.dtype)


_LAST = (((1,), (1,)), ((), ()))  # contracts the last axes of two matrices
_FEW = 64  # rows; of more, a product reads every weight often enough


def product(
    x: Float[Array, "*B D"], weight: Float[Array, "*O D"], bias: Float[Array, "*O"] | None = None
) -> Float[Array, "..."]:
    """Rows times a weight that is stored (out, in), summed with the bias in float32 or wider, and rounded once.

    On CPUs, few rows read a weight once, as it is stored. XLA would turn a bfloat16 weight into float32 for a single
    row, but not for two; and it reads a float32 weight two to three times as fast where it is the first factor.
    """
    rows, dtype = math.prod(x.shape[:-1]), _wide(x.dtype)
    arrays = x.reshape(rows, x.shape[-1]), weight.reshape(-1, x.shape[-1])
    plain = functools.partial(lax.dot_general, dimension_numbers=_LAST, preferred_element_type=dtype)
    beside_zeros = lambda x, w: lax.optimization_barrier(plain(jnp.pad(x, ((0, 1), (0, 0))), w))[:1]
    if rows == 1 and x.dtype != dtype:
        y = lax.platform_dependent(*arrays, cpu=beside_zeros, default=plain)
    elif 1 < rows <= _FEW and x.dtype == dtype:
        y = lax.platform_dependent(*arrays, cpu=lambda x, w: plain(w, x).T, default=plain)
    else:
        y = plain(*arrays)
    y = y if bias is None else y + bias.astype(dtype).reshape(1, -1)
    return y.astype(x.dtype).reshape(*x.shape[:-1], *weight.shape[:-1])


class Dense(nn.Module):
    """A projection, whose weight stands as checkpoints have it: (out, in).

    Attributes:
      config: for its dtype.
      shape: axes of the output's channels.
      bias: whether it has one.
    """

    config: DecoderConfig
    shape: tuple[int, ...]
    bias: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "..."]:
        """Projects the last axis."""
        dtype, out = jnp.dtype(self.config.dtype), tuple(range(len(self.shape)))
        start = nn.initializers.lecun_normal(in_axis=-1, out_axis=out)
        weight = self.param("weight", start, (*self.shape, x.shape[-1]), dtype)
        bias = self.param("bias", nn.initializers.zeros, self.shape, dtype).astype(dtype) if self.bias else None
        return product(x.astype(dtype), weight.astype(dtype), bias)


def dense(config: DecoderConfig, features: int | Sequence[int], bias: bool, name: str) -> Dense:
    """A projection to channels, or to several axes of them, in the config's dtype."""
    return Dense(config, (features,) if isinstance(features, int) else tuple(features), bias, name=name)


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
        y, eps = x.astype(jnp.float32), self.config.norm_eps
        # Where a root alone follows the sum, XLA reduces and scales a single row in one kernel of a GPU.
        summed = lambda y: ((jnp.square(y) + eps) / y.shape[-1]).sum(-1, keepdims=True)
        mean = lambda y: jnp.square(y).mean(-1, keepdims=True) + eps
        y = y * lax.rsqrt(lax.platform_dependent(y, cpu=mean, default=summed))
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
        return dense(c, c.embed_dim, self.bias, down)(activation(c, dense(c, c.mlp_dim, self.bias, up)(x)))


class GatedMLP(nn.Module):
    """A feed-forward network with a gate (arXiv 2002.05202).

    Attributes:
      config: sizes, dtype and the activation.
      bias: whether its projections have one.
      width: F; that of the config if None.
      down: the name of the projection down.
    """

    config: DecoderConfig
    bias: bool = False
    width: int | None = None
    down: str = "down_proj"

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The gated sum."""
        c, F = self.config, self.width or self.config.mlp_dim
        groups = math.gcd(c.num_kv_heads, F)  # which devices may share
        y = dense(c, (groups, 2, F // groups), self.bias, "gate_up_proj")(x)
        y = activation(c, y[..., 0, :]) * y[..., 1, :]
        return dense(c, c.embed_dim, self.bias, self.down)(y.reshape(*x.shape[:-1], F))


def heads(
    config: DecoderConfig, x: Float[Array, "B T D"], bias: bool, clip: float | None = None
) -> tuple[Float[Array, "B N T H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
    """Queries, keys and values, by one projection in which every kv head has its queries, its key and its value.

    So devices that share the kv heads share it. `clip` bounds what it gives.
    """
    N, K, H = config.num_query_heads, config.num_kv_heads, config.head_dim
    y = dense(config, (K, N // K + 2, H), bias, "qkv_proj")(x).transpose(0, 2, 3, 1, 4)
    y = y if clip is None else jnp.clip(y, -clip, clip)
    return y[:, :, :-2].reshape(x.shape[0], N, -1, H), y[:, :, -2], y[:, :, -1]


def attended(
    module: nn.Module,
    x: Float[Array, "B T D"],
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"] | None,
    v: Float[Array, "B K T H"] | None,
    cache: Any,
    *,
    attend: Attend,
    layer: int,
    out: str,
    bias: bool,
    logits: Logits = Logits(),
    gate: Float[Array, "B T NH"] | None = None,
) -> tuple[Float[Array, "B T D"], Any, Any]:
    """Attention, projected by the submodule `out`; the cache after the step; what else `attend` gave.

    Args:
      module: the attention in whose compact method this is called; its `config` has the sizes.
      x: what the module reads, for policies that look at hidden states.
      q, k, v: heads before rotation; None for keys and values of an earlier layer.
      cache, attend, layer: as the module was given them.
      out: the name of the output projection.
      bias: whether it has one.
      logits: how they follow from products, but for the layer's window.
      gate: factors on the output before its projection, None for none.
    """
    c: DecoderConfig = module.config  # pyrefly: ignore[missing-attribute]
    out_proj = None
    if not module.is_initializing():
        out_proj = module.variables["params"][out]["weight"].T.reshape(*q.shape[1::2], c.embed_dim)
    logits = dataclasses.replace(logits, window=c.window(layer))
    options = {"rotate": c.rotation(layer), "out_proj": out_proj, "hidden": x, "logits": logits}
    y, cache, stats = attend(cache, q, k, v, layer=layer, **options)  # pyrefly: ignore[bad-argument-type]
    B, _, T, _ = y.shape
    y = y.transpose(0, 2, 1, 3).reshape(B, T, -1)
    y = y if gate is None else y * gate
    return dense(c, c.embed_dim, bias, out)(y), cache, stats


def embedding(module: nn.Module, name: str, rows: int, width: int | None = None) -> Float[Array, "V _"]:
    """A table of vectors of embed_dim channels, or of `width`, one a token or a position."""
    c: DecoderConfig = module.config  # pyrefly: ignore[missing-attribute]
    shape = rows, c.embed_dim if width is None else width
    return module.param(name, nn.initializers.normal(0.02), shape, jnp.dtype(c.dtype))


def embedded(table: Float[Array, "V E"], tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """The vectors of tokens. A bad id must not look like a good one: beyond the table or below 0 it is NaN."""
    if table.dtype.itemsize == 2:  # of which XLA on CPUs would otherwise keep a copy in float32 for a loop
        table, tokens = lax.optimization_barrier((table, tokens))
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
