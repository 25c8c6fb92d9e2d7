"""The specification: attention and its column statistics written out with the whole matrix.

Quadratic in memory and slow. Every other implementation is tested against this one.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.columns import Attention, Columns, accumulator, apply_element, reduce_group, thresholds


def visible(q_pos: Int[Array, "B T"], kv_pos: Int[Array, "B K S"], window: int | None) -> Bool[Array, "B K T S"]:
    """Which keys a row may read: live (position not negative), not later than the row, inside the sliding window."""
    q, k = q_pos[:, None, :, None], kv_pos[:, :, None, :]
    seen = (k >= 0) & (k <= q)
    return seen if window is None else seen & (q - k < window)


def attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    *,
    columns: Sequence[Columns] = (),
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Attention:
    """See `pallas_kernels.attention`."""
    B, N, T, H = q.shape
    K = k.shape[1]
    dtype = accumulator(q.dtype)
    q, k_, v_ = (x.astype(dtype) for x in (q.reshape(B, K, N // K, T, H), k, v))

    logits = jnp.einsum("bkgth,bksh->bkgts", q, k_) * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    seen = visible(q_pos, kv_pos, window)
    logits = jnp.where(seen[:, :, None], logits, -jnp.inf)
    top = jnp.maximum(logits.max(-1, keepdims=True), jnp.finfo(dtype).min)  # finite, so an unseeing row is not NaN
    e = jnp.exp(logits - top)
    mass = e.sum(-1, keepdims=True)
    p = e / jnp.where(mass > 0, mass, 1.0)
    lse = (top + jnp.log(mass))[..., 0]
    out = jnp.einsum("bkgts,bksh->bkgth", p, v_)

    measured = []
    for spec in columns:
        weight = jnp.ones((B, T), dtype) if spec.weight is None else spec.weight.astype(dtype)
        if spec.rows is not None:
            weight = jnp.where((jnp.arange(T) >= T - spec.rows)[None], weight, 0.0)
        theta = thresholds(spec, q_pos, seen.sum(-1), dtype)
        if spec.group is not None and spec.group_at == "before":
            reduced = reduce_group(p, spec.group, axis=2)
            f = apply_element(reduced, spec, None if theta is None else theta[..., None])
            measured.append(jnp.einsum("bt,bkts->bks", weight, f))
        else:
            f = apply_element(p, spec, None if theta is None else theta[:, :, None, :, None])
            sums = jnp.einsum("bt,bkgts->bkgs", weight, f)
            measured.append(sums.reshape(B, N, -1) if spec.group is None else reduce_group(sums, spec.group, axis=2))
    return Attention(out.reshape(B, N, T, -1), lse.reshape(B, N, T), tuple(measured))
