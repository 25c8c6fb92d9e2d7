"""The best that could have been kept, had the queries to come been known.

What is optimal here is one quantity: the attention that future queries lose, summed over rows and query heads. It is a
sum over evicted tokens of numbers that are not negative, so among all masks that keep equally many tokens the one that
keeps the largest is the best, by exchange of any two tokens. So this oracle is never beaten, and neither is the minimum
of Theorem 2's bound of the mean loss, a multiple of it. The exact loss of outputs has no such oracle: the vectors that
evicted tokens take away can cancel, so a mask that loses more attention may move an output less.

Letters: B prompts, L layers, N query heads, K kv heads, S slots, R query rows, H head_dim.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.contract import Size
from kvjax.pallas_kernels import Columns, Logits, attention

Across = Literal["head", "layer", "model"]
"""Who competes for the tokens that are kept: each head keeps as many as before, each layer, or the model."""


def future_attention(
    q: Float[Array, "B N R H"],
    k: Float[Array, "B K S H"],
    q_pos: Int[Array, "B R"],
    kv_pos: Int[Array, "B K S"],
    *,
    bias: Float[Array, "B N S"] | None = None,
    logits: Logits = Logits(),
) -> Float[Array, "B N S"]:
    """The share of a row's attention that every token receives, averaged over R query rows, for each query head.

    Args:
      q: queries, rotated.
      k: keys of all slots, those of the rows themselves last.
      q_pos, kv_pos, bias, logits: as in `kvjax.pallas_kernels.attention`.
    """
    rows = Columns(group=None)
    total = attention(q, k, k, q_pos, kv_pos, columns=(rows,), bias=bias, logits=logits).columns[0]
    return total / jnp.maximum((q_pos >= 0).sum(-1), 1).astype(total.dtype)[:, None, None]


def of_kv_heads(mass: Float[Array, "B N S"], num_kv_heads: Size) -> Float[Array, "B K S"]:
    """The mean over the query heads of every kv head."""
    B, N, S = mass.shape
    return mass.reshape(B, num_kv_heads, N // num_kv_heads, S).mean(2)


def lost_mass(mass: Float[Array, "*B S"], keep: Bool[Array, "*B S"]) -> Float[Array, "*B"]:
    """Attention paid to tokens that are not kept, for every head.

    Raises:
      ValueError: `keep` is no mask, or one of other tokens.
    """
    return jnp.where(keep, 0.0, mass).sum(-1)


def _competing(x: Array, across: Across) -> Array:
    """The numbers of those that compete, on the last axis."""
    B, L, K, S = x.shape
    shapes = {"head": (B, L * K, S), "layer": (B, L, K * S), "model": (B, 1, L * K * S)}
    return x.reshape(shapes[across])


def hindsight_rank(
    mass: Float[Array, "B L K S"], live: Bool[Array, "B L K S"], across: Across = "head"
) -> Int[Array, "B L K S"]:
    """Rank of every live token by future attention, 0 for the best, among all that compete.

    `rank < n` keeps the best n at any n, traced or not; dead slots rank last.

    Raises:
      ValueError: `live` is no mask, or one of other tokens; `across` is unknown.
    """
    order = jnp.argsort(_competing(jnp.where(live, -mass, jnp.inf), across), axis=-1, stable=True)
    return jnp.argsort(order, axis=-1).astype(jnp.int32).reshape(mass.shape)


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
      ValueError: masks that are none, or of other tokens; `across` is unknown.
    """
    rank = hindsight_rank(mass, live, across)
    count = _competing(keep & live, across).sum(-1, keepdims=True, dtype=jnp.int32)
    return live & (_competing(rank, across) < count).reshape(live.shape)


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

    Raises:
      ValueError: what `best_in_hindsight` refuses.
    """
    B, L, K, _ = mass.shape
    best = _competing(best_in_hindsight(mass, live, keep, across), across)
    kept, there, mass = (_competing(x, across) for x in (keep & live, live, mass))
    # Equally many were missed as were kept for nothing, so a threshold between the two cancels; no term is negative.
    bar = jnp.where(there & ~best, mass, 0.0).max(-1, keepdims=True)
    gain = jnp.where(best & ~kept, mass - bar, 0.0).sum(-1) + jnp.where(kept & ~best, bar - mass, 0.0).sum(-1)
    return gain.reshape(B, 1 if across == "model" else L, -1).sum(-1) / (K * (L if across == "model" else 1))
