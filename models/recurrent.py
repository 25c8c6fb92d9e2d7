"""Layers with a state of constant size in place of keys and values: short convolutions, and the gated delta rule.

Letters: B batch, T tokens, C channels, W last inputs of a convolution, H heads, K and V sizes of keys and values.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.models.config import DecoderConfig

CHUNK = 64  # tokens that the delta rule takes at once


class Convolution(nn.Module):
    """A causal convolution of each channel by itself.

    Attributes:
      config: for its dtype.
      channels: C.
      taps: inputs of an output, its own among them.
      bias: whether it has one.
    """

    config: DecoderConfig
    channels: int
    taps: int
    bias: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T C"], last: Float[Array, "B W C"], pos: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
        """Outputs in float32, and the last inputs after them.

        Args:
          x: the new inputs, padding before others.
          last: the inputs before them.
          pos: positions, -1 for padding, which leaves the last inputs as they are.
        """
        T, dtype = x.shape[1], jnp.dtype(self.config.dtype)
        weight = self.param("weight", nn.initializers.lecun_normal(-1, 0), (self.channels, 1, self.taps), dtype)
        every = behind(last, x, pos)
        wide = every.astype(jnp.float32)
        factors = weight[None, None, :, 0].astype(jnp.float32)
        y = functools.reduce(jnp.add, [wide[:, j : j + T] * factors[..., j] for j in range(self.taps)])
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.channels,), dtype)
            y = y + bias.astype(jnp.float32)[None, None]
        return y, every[:, T:]


def behind(last: Float[Array, "B W C"], x: Float[Array, "B T C"], pos: Int[Array, "B T"]) -> Float[Array, "B WT C"]:
    """New inputs behind the last ones. Padding, which stands before others, moves before both, and is 0."""
    W, T = last.shape[1], x.shape[1]
    place = jnp.arange(W + T)[None] - (pos < 0).sum(1)[:, None]  # among the last inputs and those of tokens
    old = jnp.take_along_axis(last, jnp.clip(place, 0, max(W - 1, 0))[..., None], 1) if W else 0.0
    new = jnp.pad(x, ((0, 0), (W, 0), (0, 0)))
    place = place[..., None]
    return jnp.where(place >= W, new, jnp.where(place >= 0, old, 0.0).astype(x.dtype))


def delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    decay: Float[Array, "B T H"],
    rate: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    exist: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Linear attention by the gated delta rule (arXiv 2412.06464, Equation 10), by chunks, in float32.

    Each token has the state decay, writes `rate` times what its value differs from what the state gives for its key,
    and reads with its query.

    Args:
      q, k: queries times their scale, and keys.
      v: values.
      decay: logarithms of factors, at most 0.
      rate: from 0 to 1.
      state: before the first token.
      exist: which are no padding; padding changes nothing.

    Returns:
      What is read, and the state after the last token.
    """
    T = q.shape[1]
    decay, rate = (jnp.where(exist[..., None], x.astype(jnp.float32), 0.0) for x in (decay, rate))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    if T == 1:
        state = state * jnp.exp(decay[:, 0])[..., None, None]
        change = rate[:, 0, :, None] * (v[:, 0] - jnp.einsum("bhk,bhkv->bhv", k[:, 0], state))
        state = state + k[:, 0][..., None] * change[..., None, :]
        return jnp.einsum("bhk,bhkv->bhv", q[:, 0], state)[:, None], state
    size = min(CHUNK, T)

    def chunks(x: Array) -> Array:
        x = jnp.pad(x, [(0, -T % size if i == 1 else 0) for i in range(x.ndim)])
        x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)  # "chunks B H size ..."

    lower = jnp.tril(jnp.ones((size, size), bool))[None, None]

    def chunk(state: Array, at: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, decay, rate = at
        since = jnp.cumsum(decay, -1)
        between = jnp.exp(jnp.where(lower, since[..., None] - since[..., None, :], -jnp.inf))
        product = lambda x: jnp.einsum("bhik,bhjk->bhij", x, k) * between
        written = k * rate[..., None]
        both = jnp.concatenate([v * rate[..., None], written * jnp.exp(since)[..., None]], axis=-1)
        solved = lax.linalg.triangular_solve(product(written), both, left_side=True, lower=True, unit_diagonal=True)
        change = solved[..., : v.shape[-1]] - solved[..., v.shape[-1] :] @ state
        out = (q * jnp.exp(since)[..., None]) @ state + product(q) @ change
        left = jnp.exp(since[..., -1:] - since)
        state = state * jnp.exp(since[..., -1])[..., None, None]
        return state + jnp.einsum("bhik,bhiv->bhkv", k * left[..., None], change), out

    state, out = lax.scan(chunk, state, tuple(map(chunks, (q, k, v, decay, rate))))
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 2, 3)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :T], state


def unit(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """Vectors of length 1, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


class GatedNorm(nn.Module):
    """Root-mean-square normalisation, and a gate behind it."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*B V"], gate: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
        """Normalises the last axis."""
        dtype, y = gate.dtype, x.astype(gate.dtype).astype(jnp.float32)
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.dtype(self.config.dtype))
        y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.config.norm_eps)
        y = (y.astype(dtype) * jnp.broadcast_to(scale, x.shape)).astype(jnp.float32)
        return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(dtype)
