"""One query row a head against a flat pool of slots, each owned by one kv head: a softmax by owner, for XLA.

All query heads meet all slots in two plain matrix products, and masks leave every head its own slots. That is K times
the arithmetic of a dense cache, but gathers, sorts and sums by owner cost more on CPU than a wider matrix product.
`experiments/bench_pool.py` compares it with a dense cache of as many slots.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.columns import Attention, Columns, accumulator, apply_element, draw_noise, reduce_group, thresholds


def pooled_attention(
    q: Float[Array, "B N 1 H"],
    k: Float[Array, "B P H"],
    v: Float[Array, "B P H"],
    owner: Int[Array, "B P"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B P"],
    *,
    num_kv_heads: int,
    columns: Sequence[Columns] = (),
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Attention:
    """See `pallas_kernels.pooled_attention`. Differentiable, statistics included."""
    B, N = q.shape[:2]
    K = num_kv_heads
    G = N // K
    dtype = accumulator(q.dtype)
    owner = jnp.where(kv_pos >= 0, owner, -1)
    x = jnp.einsum("bnh,bph->bnp", q[:, :, 0], k, preferred_element_type=dtype) * jnp.asarray(scale, dtype)
    if softcap is not None:
        x = softcap * jnp.tanh(x / softcap)
    x = x.reshape(B, K, G, -1)
    seen = pool_visible(owner, q_pos, kv_pos, window)
    e, mass, lse = _exponentials(x, seen, owner)
    out = jnp.einsum("bnp,bph->bnh", e.reshape(B, N, -1).astype(v.dtype), v, preferred_element_type=dtype)
    inverse_mass = 1.0 / jnp.where(mass > 0, mass, 1.0)
    out = (out * inverse_mass.reshape(B, N, 1)).astype(q.dtype)
    p = _total(e, inverse_mass) if columns else None
    x = _select_owner(x, owner) if any(c.softmax is not None for c in columns) else None
    measured = pool_columns(columns, p, x, seen, owner, q_pos, kv_pos, num_kv_heads=K, window=window)
    return Attention(out[:, :, None], lse.reshape(B, N, 1), measured)


def pool_visible(
    owner: Int[Array, "B P"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B P"],
    window: int | None,
    causal: bool = True,
) -> Bool[Array, "B P"]:
    """Which slots the row of their owner may read."""
    seen = (owner >= 0) & (kv_pos >= 0) & (kv_pos <= q_pos if causal else q_pos >= 0)
    return seen if window is None else seen & (q_pos - kv_pos < window)


def _owned(owner: Int[Array, "B P"], seen: Bool[Array, "B P"], num_kv_heads: int) -> Bool[Array, "B K P"]:
    """Which slots the row of a kv head reads."""
    return seen[:, None] & (owner[:, None] == jnp.arange(num_kv_heads, dtype=owner.dtype)[None, :, None])


def _select_owner(x: Float[Array, "B K G P"], owner: Int[Array, "B P"]) -> Float[Array, "B G P"]:
    """The values of every slot's own kv head; those of head 0 for a dead slot.

    A chain of selects over the heads stays in vector registers; a gather, or a sum over a mask, does not.
    """
    found = x[:, 0]
    for head in range(1, x.shape[1]):
        found = jnp.where((owner == head)[:, None], x[:, head], found)
    return found


def by_owner(x: Float[Array, "B K G"], owner: Int[Array, "B P"]) -> Float[Array, "B G P"]:
    """A number of every kv head at the slots that it owns."""
    return _select_owner(jnp.broadcast_to(x[..., None], (*x.shape, owner.shape[1])), owner)


def _exponentials(x: Float[Array, "B K G P"], seen: Bool[Array, "B P"], owner: Int[Array, "B P"]):
    """`exp(x - top)` with the maximum of every head over its own slots, 0 elsewhere, their sums and the logsumexp."""
    x = jnp.where(_owned(owner, seen, x.shape[1])[:, :, None], x, -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(x.max(-1), jnp.finfo(x.dtype).min))  # finite where a head sees nothing
    e = jnp.exp(x - top[..., None])
    mass = e.sum(-1)
    return e, mass, jnp.where(mass > 0, top + jnp.log(jnp.where(mass > 0, mass, 1.0)), -jnp.inf)


def _total(e: Float[Array, "B K G P"], factor: Float[Array, "B K G"]) -> Float[Array, "B G P"]:
    """Sum over the kv heads, of which only a slot's owner is not 0. As a loop: XLA's sum over this axis is slow."""
    return sum((e[:, k] * factor[:, k, :, None] for k in range(1, e.shape[1])), e[:, 0] * factor[:, 0, :, None])


def pool_columns(
    columns: Sequence[Columns],
    p: Float[Array, "B G P"] | None,
    x: Float[Array, "B G P"] | None,
    seen: Bool[Array, "B P"],
    owner: Int[Array, "B P"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B P"],
    *,
    num_kv_heads: int,
    window: int | None,
) -> tuple[Array, ...]:
    """Every statistic of one row, from its probabilities `p` and its capped logits `x` before the mask.

    `x` is read only by statistics with a softmax of their own, `p` by the others.
    """
    return tuple(_column(c, p, x, seen, owner, q_pos, kv_pos, num_kv_heads, window) for c in columns)


def _column(spec: Columns, p, x, seen, owner, q_pos, kv_pos, num_kv_heads, window):
    B, G, _ = (p if x is None else x).shape
    own = spec.softmax
    if own is not None:
        if not own.causal:
            seen = pool_visible(owner, q_pos, kv_pos, window, causal=False)
        if own.before is not None:
            seen = seen & (kv_pos < own.before[:, None])
        if own.noise is not None:
            seed = None if own.seed is None else own.seed[:, None, None]
            head = jnp.maximum(owner, 0)[:, None] * G + jnp.arange(G, dtype=owner.dtype)[None, :, None]
            x = x + draw_noise(own, seed, head, q_pos[:, None], kv_pos[:, None])
        if own.multiplier is not None:
            x = x * by_owner(own.multiplier.astype(x.dtype), owner)
        e, mass, _ = _exponentials(jnp.repeat(x[:, None], num_kv_heads, axis=1), seen, owner)
        p = _total(e, 1.0 / jnp.where(mass > 0, mass, 1.0))
    if not spec.count_self:
        p = jnp.where((kv_pos == q_pos)[:, None], 0.0, p)
    theta = thresholds(spec, q_pos, _owned(owner, seen, num_kv_heads).sum(-1)[..., None], p.dtype)
    if theta is not None:
        theta = by_owner(jnp.broadcast_to(theta, (B, num_kv_heads, 1)), owner)
    weight = jnp.ones((B, 1), p.dtype) if spec.weight is None else spec.weight.astype(p.dtype)
    if spec.group is not None and spec.group_at == "before":
        p = reduce_group(p, spec.group, axis=1)
        f = apply_element(p, spec, None if theta is None else theta[:, 0]) * weight
    else:
        f = apply_element(p, spec, theta) * weight[:, None]
        f = f if spec.group is None else reduce_group(f, spec.group, axis=1)
    return f if spec.summed else f[..., None, :]
