"""Statistics of an attention matrix, one number a key, without ever holding the matrix.

Letters: B batch, N query heads, K kv heads, G = N // K, T query rows, S slots (keys), H head_dim.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from kvjax.pallas_kernels.kinds import Size, check_fields
from kvjax.pallas_kernels.pytree import pytree, static

Element = Literal["p", "p2", "above"]
Group = Literal["mean", "max", "sum"]
Noise = Literal["gumbel", "gaussian", "constant"]


@pytree
class Softmax:
    """A softmax of a statistic's own: `softmax(multiplier * (logits + noise))`, while the output keeps the usual one.

    Attributes:
      multiplier: factor on the scaled logits of every row of a kv head: SG-softmax (AhaKV), `1 / tau` (Keyformer).
      seed: one number a sequence; noise is a hash of (seed, query head, query position, key position), so that every
        pass, block and implementation sees the same draw.
      noise: "gumbel" (standard), "gaussian" or "constant" of the same mean and deviation; None for none.
      per: "call" draws for every (row, key), "key" once for every key.
      causal: False lets rows see later keys too, up to the newest row.
      before: only keys at positions below this count, in numerator and normaliser.
      heads: the numbers of the query heads, by which noise is drawn; 0 to N - 1 if None.
    """

    multiplier: Float[Array, "B K T"] | None = None
    seed: UInt32[Array, "B"] | None = None
    before: Int[Array, "B"] | None = None
    noise: Noise | None = static(default=None)
    per: Literal["call", "key"] = static(default="call")
    causal: bool = static(default=True)
    heads: Int[Array, "N"] | None = None

    def __post_init__(self):
        check_fields(self)
        if (self.noise in ("gumbel", "gaussian")) != (self.seed is not None):
            raise ValueError(f"noise={self.noise!r} needs a seed, and a seed needs noise that is drawn")


EULER_GAMMA = 0.5772156649015329  # mean of a standard Gumbel; its standard deviation is pi / sqrt(6)
GUMBEL_STD = 1.2825498301618641

ROUNDING = 128  # what exponentials and normalisers of moderate logits make of equal numbers, with room


# log(1 + f) / f for 1 + f within [sqrt(0.5), sqrt(2)], from the constant on: least squares of the relative error at
# Chebyshev nodes, 2e-7 at most.
_LOG1P = (
    0.999999971,
    -0.500003763,
    0.333345492,
    -0.249687802,
    0.19915002,
    -0.172816523,
    0.161141674,
    -0.0986878589,
)


def _term(index: Int[Array, "..."]) -> UInt32[Array, "..."]:
    """An index as `hash_uniform` mixes it in."""
    return jnp.asarray(index).astype(jnp.uint32) * np.uint32(0x9E3779B9) + np.uint32(0x85EBCA6B)


def _mixed(h: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Two rounds of multiplication and shift (a 32-bit finaliser with low bias)."""
    h = (h ^ (h >> 16)) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * np.uint32(0x846CA68B)
    return h ^ (h >> 16)


def _uniform(h: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """A number in (0, 1): an odd multiple of 2^-24."""
    return ((h >> 9).astype(jnp.float32) + 0.5) * (2.0**-23)


def _absorbed(seed: Array, *indices: Array) -> UInt32[Array, "..."]:
    h = jnp.asarray(seed, jnp.uint32)  # shifts of signed numbers are others
    for index in indices:
        h = _mixed(h ^ _term(index))
    return h


def hash_uniform(seed: UInt32[Array, "..."], *indices: Int[Array, "..."]) -> Float[Array, "..."]:
    """A uniform number in (0, 1) that depends on nothing but its arguments, which broadcast."""
    return _uniform(_absorbed(seed, *indices))


def minus_log(u: Float[Array, "..."]) -> Float[Array, "..."]:
    """`-log(u)` of normal float32 numbers, to 4e-7 of it: a polynomial on their bits, in half of `jnp.log`'s time."""
    bits = lax.bitcast_convert_type(u, jnp.int32)
    exponent = (bits - np.int32(0x3F3504F3)) >> 23  # of two, such that what is left lies around 1
    f = lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32) - 1.0
    series = functools.reduce(lambda total, c: total * f + np.float32(c), _LOG1P[-2::-1], np.float32(_LOG1P[-1]))
    return exponent.astype(jnp.float32) * np.float32(-np.log(2.0)) - series * f


def head_numbers(spec: Softmax, num_query_heads: int) -> Int[Array, "N"]:
    """The number of every query head."""
    return jnp.arange(num_query_heads, dtype=jnp.int32) if spec.heads is None else spec.heads


def rescaled(logits: Float[Array, "..."], multiplier: Float[Array, "..."]) -> Float[Array, "..."]:
    """Their product, where a key that a bias of -inf has hidden stays hidden: a multiplier of 0 would make it NaN."""
    hidden = logits == -jnp.inf
    return jnp.where(hidden, -jnp.inf, jnp.where(hidden, 0.0, logits) * multiplier)


def draw_noise(
    spec: Softmax, seed: Array | None, head: Array, q_pos: Array, kv_pos: Array
) -> Float[Array, "..."] | float:
    """The noise of `spec` for broadcast heads and positions. Heads are query heads."""
    if spec.noise is None or seed is None:  # a seed is there exactly where noise is drawn
        return EULER_GAMMA if spec.noise == "constant" else 0.0
    if spec.noise == "gumbel":
        return minus_log(draw_exponential(spec, seed, head, q_pos, kv_pos))
    row = jnp.zeros_like(q_pos) if spec.per == "key" else q_pos
    return EULER_GAMMA + GUMBEL_STD * jax.scipy.special.ndtri(hash_uniform(seed, head, row, kv_pos))


def draw_exponential(spec: Softmax, seed: Array, head: Array, q_pos: Array, kv_pos: Array) -> Float[Array, "..."]:
    """`E = exp(-g)` for the Gumbel noise `g` of `draw_noise`, from the same draws: exponential, of mean 1.

    `exp(x + g)` is `exp(x) / E`. As `E` lies between 5e-8 and 17, such numerators need no maximum of their own: after
    the maximum of `x` has been taken off they stay below 2e7, and the largest of a row's `x` leaves at least 0.05.
    """
    row = jnp.zeros_like(q_pos) if spec.per == "key" else q_pos
    # Done once a row and once a key: left to the compiler, it would be done for both together.
    rows, keys = lax.optimization_barrier((_absorbed(seed, head, row), _term(kv_pos)))
    return minus_log(_uniform(_mixed(rows ^ keys)))


@pytree
class Columns:
    """A column statistic: for every key `j`, the sum over query rows `i` of `weight_i * f(p_ij)`.

    `p` is the attention matrix after the softmax, causal zeros included.

    Attributes:
      rows: only the last `rows` query rows count; None for all of them.
      element: `f`: "p" the probability, "p2" its square, "above" whether it exceeds `threshold` (strictly).
      threshold: for "above": a number, or "1/visible" (one over the keys the row can see by their positions, those
        that a bias of -inf hides included), or "1/position" (one over the row's position + 1).
      group: how the G query heads of a kv head become one number; None keeps one number a query head.
      group_at: "before" reduces the probabilities, then applies `f`; "after" reduces the finished sums. They differ
        for squares, thresholds and max.
      count_self: False leaves out every row's own token (`q_pos == kv_pos`).
      summed: False returns the rows themselves instead of their sum; for few rows only.
      weight: a weight for every query row, or None for ones.
      softmax: a softmax of the statistic's own, or None for that of the output.
    """

    rows: Size | None = static(default=None)
    element: Element = static(default="p")
    threshold: float | Literal["1/visible", "1/position"] = static(default="1/visible")
    group: Group | None = static(default="mean")
    group_at: Literal["before", "after"] = static(default="after")
    count_self: bool = static(default=True)
    summed: bool = static(default=True)
    weight: Float[Array, "B T"] | None = None
    softmax: Softmax | None = None

    def __post_init__(self):
        check_fields(self)
        if self.group is None and self.group_at == "before":
            raise ValueError("group=None keeps every query head, so there is no group to reduce 'before'")

    @property
    def per_query_head(self) -> bool:
        """Whether sums must be kept for each query head until the last row has been read."""
        if self.group is None:
            return True
        linear = self.element == "p" and self.group in ("mean", "sum")
        return self.group_at == "after" and not linear

    @property
    def fused(self) -> bool:
        """Whether the pass that computes the attention output sees all this statistic needs."""
        own = self.softmax
        return self.summed and self.count_self and (own is None or (own.causal and own.before is None))

    def describe(self) -> str:
        """The settings that are not arrays, for messages."""
        own = "" if self.softmax is None else ", own softmax"
        rows = "all" if self.rows is None else self.rows
        return f"rows={rows}, element={self.element}, group={self.group} {self.group_at}, summed={self.summed}{own}"

    def finish(self, sums: Float[Array, "B K *rest"]) -> Float[Array, "B _ *others"]:
        """Reduces sums, or rows, that were kept for each query head ("B K G ...") to their published shape."""
        if not self.per_query_head:
            return sums
        if self.group is None:
            B, K, G, *rest = sums.shape
            return sums.reshape(B, K * G, *rest)
        return reduce_group(sums, self.group, axis=2)


@pytree
class Attention:
    """Result of `attention`.

    Attributes:
      out: the attention output.
      lse: natural-log logsumexp of every row's logits in float32, -inf for a row that sees nothing.
      columns: one array for each requested `Columns`: "B K S", or "B N S" where `group` is None, with an axis for rows
        before the last where they are not `summed`. float32.
    """

    out: Float[Array, "B N T H"]
    lse: Float[Array, "B N T"]
    columns: tuple[Array, ...]


@pytree
class Recovery:
    """Result of `recovered_attention`, for every set of keys.

    Attributes:
      mass: the probability on kept keys, averaged over the rows that see anything; 0 where there are none.
      elementwise: the share of all visible entries that renormalising changes by less than the tolerance, None if
        it was not asked for.
    """

    mass: Float[Array, "B K M"]
    elementwise: Float[Array, "B K M"] | None


def accumulator(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype of sums over inputs of `dtype`: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def reduce_group(x: Array, group: Group, *, axis: int) -> Array:
    """Reduces the query heads of a group along `axis`."""
    return {"mean": jnp.mean, "max": jnp.max, "sum": jnp.sum}[group](x, axis=axis)


def apply_element(p: Array, spec: Columns, theta: Array | None) -> Array:
    """`f(p)` of `spec`; `theta` is the threshold, broadcastable to `p`, where there is one."""
    if theta is not None:
        return (p > theta).astype(p.dtype)
    return p * p if spec.element == "p2" else p


def thresholds(
    spec: Columns, q_pos: Int[Array, "B R"], num_visible: Int[Array, "B K R"], dtype: jax.typing.DTypeLike
) -> Float[Array, "B #K R"] | None:
    """The threshold of every row in a block, or None where `spec` has none.

    Strict comparisons are of exact numbers: a threshold stands above what rounding makes of a probability (or a group's
    mean of them) that equals it, such as those of a uniform row, by `ROUNDING` units in the last place. No probability
    is above 1, nor is a group's mean or maximum: such thresholds are infinite.
    """
    if spec.element != "above":
        return None
    if spec.threshold == "1/visible":
        theta = 1.0 / jnp.maximum(num_visible, 1).astype(dtype)
    elif spec.threshold == "1/position":
        theta = (1.0 / (jnp.maximum(q_pos, 0) + 1).astype(dtype))[:, None]
    else:
        theta = jnp.full(q_pos.shape, float(spec.threshold), dtype)[:, None]
    raised = theta * (1.0 + ROUNDING * float(jnp.finfo(dtype).eps))
    if spec.group == "sum" and spec.group_at == "before":
        return raised
    return jnp.where(theta < 1, raised, jnp.inf)
