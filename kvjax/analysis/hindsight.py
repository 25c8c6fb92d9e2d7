"""The best that could have been kept, had the queries to come been known.

What is optimal here is one quantity: the attention that future queries lose, summed over rows and query heads. It is a
sum over evicted tokens of numbers that are not negative, so among all masks that keep equally many tokens the one that
keeps the largest is the best, by exchange of any two tokens. So this oracle is never beaten, and neither is the minimum
of Theorem 2's bound of the mean loss, a multiple of it. The exact loss of outputs has no such oracle: the vectors that
evicted tokens take away can cancel, so a mask that loses more attention may move an output less.
"""

from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.pallas_kernels import Columns, attention
from kvjax.pallas_kernels.values import as_annotated, check_array, one_of

Across = Literal["head", "layer", "model"]
"""Who competes for the tokens that are kept: each head keeps as many as before, each layer, or the model."""


@as_annotated
def future_attention(
    q: Float[Array, "B N R H"],
    k: Float[Array, "B K S H"],
    q_pos: Int[Array, "B R"],
    kv_pos: Int[Array, "B K S"],
    *,
    bias: Float[Array, "B N S"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B N S"]:
    """The share of a row's attention that every token receives, averaged over R query rows, for each query head.

    Args:
      q: queries, rotated.
      k: keys of all slots, those of the rows themselves last.
      q_pos, kv_pos, bias, scale, window, softcap: as in `kvjax.pallas_kernels.attention`.
    """
    rows = Columns(group=None)
    options = {"bias": bias, "scale": scale, "window": window, "softcap": softcap}
    total = attention(q, k, k, q_pos, kv_pos, columns=(rows,), **options).columns[0]
    return total / jnp.maximum((q_pos >= 0).sum(-1), 1).astype(total.dtype)[:, None, None]


@as_annotated
def of_kv_heads(mass: Float[Array, "B N S"], num_kv_heads: int) -> Float[Array, "B K S"]:
    """The mean over the query heads of every kv head."""
    B, N, S = mass.shape
    return mass.reshape(B, num_kv_heads, N // num_kv_heads, S).mean(2)


@as_annotated
def lost_mass(mass: Float[Array, "*B S"], keep: Bool[Array, "*B S"]) -> Float[Array, "*B"]:
    """Attention paid to tokens that are not kept, for every head.

    Raises:
      ValueError: a mask that is none, or of other tokens.
    """
    check_array("keep", keep, *("...",) * (mass.ndim - 1), "tokens", kind=np.bool_, shape=mass.shape)
    return jnp.where(keep, 0.0, mass).sum(-1)


def _competing(x: Array, across: Across) -> Array:
    """Those that compete, on the last axis."""
    one_of("across", across, *get_args(Across))
    B, L, K, S = x.shape
    return x.reshape({"head": (B, L * K, S), "layer": (B, L, K * S), "model": (B, 1, L * K * S)}[across])


@as_annotated
def hindsight_rank(
    mass: Float[Array, "B L K S"], live: Bool[Array, "B L K S"], across: Across = "head"
) -> Int[Array, "B L K S"]:
    """Rank of every live token by future attention, 0 for the best, among all that compete.

    `rank < n` keeps the best n at any n, traced or not; dead slots rank last.

    Raises:
      ValueError: live tokens that are no mask, or of other tokens.
    """
    key = _competing(jnp.where(live, -mass, jnp.inf), across)
    order = jnp.argsort(key, axis=-1, stable=True)
    place = jnp.broadcast_to(jnp.arange(key.shape[-1], dtype=jnp.int32), key.shape)
    return jnp.put_along_axis(place, order, place, axis=-1, inplace=False).reshape(mass.shape)


@as_annotated
def best_in_hindsight(
    mass: Float[Array, "B L K S"], live: Bool[Array, "B L K S"], keep: Bool[Array, "B L K S"], across: Across = "head"
) -> Bool[Array, "B L K S"]:
    """The mask that loses the least future attention among those that keep as many tokens as `keep`.

    Args:
      mass: future attention to every token of L layers, the mean of a group (`of_kv_heads`).
      live: tokens that exist.
      keep: a mask, for its counts.
      across: as many in every "head", in every "layer", or in the whole "model".

    Raises:
      ValueError: masks that are none, or of other tokens.
    """
    rank = hindsight_rank(mass, live, across)
    count = _competing(keep & live, across).sum(-1, keepdims=True, dtype=jnp.int32)
    return live & (_competing(rank, across) < count).reshape(live.shape)


@as_annotated
def regret(
    mass: Float[Array, "B L K S"], live: Bool[Array, "B L K S"], keep: Bool[Array, "B L K S"], across: Across = "head"
) -> Float[Array, "B groups"]:
    """How much more future attention a mask loses than the best one in hindsight of the same size. Never negative.

    Across heads it is the price of keeping the wrong tokens; what it grows by across layers is the price of giving
    heads the wrong budgets, and across the model that of giving layers the wrong budgets.

    Args:
      mass, live, keep, across: as in `best_in_hindsight`.

    Returns:
      Means over the heads of every layer, "B L", or of all layers, "B 1", where the model competes.
    """
    B, L, K, _ = mass.shape
    best = _competing(best_in_hindsight(mass, live, keep, across), across)
    kept, live_, mass_ = (_competing(x, across) for x in (keep & live, live, mass))
    # Equally many were missed as were kept for nothing, so a threshold between the two cancels; no term is negative.
    bar = jnp.where(live_ & ~best, mass_, 0.0).max(-1, keepdims=True)
    gain = jnp.where(best & ~kept, mass_ - bar, 0.0).sum(-1) + jnp.where(kept & ~best, bar - mass_, 0.0).sum(-1)
    return gain.reshape(B, 1 if across == "model" else L, -1).sum(-1) / (K * (L if across == "model" else 1))
