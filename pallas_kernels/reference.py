"""The specification: attention and its column statistics written out with the whole matrix.

Quadratic in memory and slow. Every other implementation is tested against this one.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.pallas_kernels.columns import (
    Attention,
    Columns,
    Recovery,
    accumulator,
    apply_element,
    draw_noise,
    head_numbers,
    reduce_group,
    rescaled,
    thresholds,
)
from kvjax.pallas_kernels.logits import Logits


def attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    bias: Float[Array, "B N S"] | None = None,
    nothing: Float[Array, "N"] | None = None,
    *,
    columns: Sequence[Columns] = (),
    logits: Logits,
    more: Float[Array, "B K T S"] | None = None,
    reads: Bool[Array, "B K T S"] | None = None,
) -> Attention:
    """`kvjax.pallas_kernels.attention` with the whole matrix: the specification.

    Beyond it, rows may differ in what is added to their logits, `more`, and in the slots that each of them `reads`.
    """
    B, N, T, H = q.shape
    K = k.shape[1]
    dtype = accumulator(q.dtype)
    q, k_, v_ = (x.astype(dtype) for x in (q.reshape(B, K, N // K, T, H), k, v))

    x = logits.of(jnp.einsum("bkgth,bksh->bkgts", q, k_), H)
    if bias is not None:
        x = x + bias.reshape(B, K, N // K, 1, -1).astype(dtype)
    x = x if more is None else x + more[:, :, None]
    seen = logits.visible(q_pos, kv_pos)
    seen = seen if reads is None else seen & reads
    nothing = None if nothing is None else nothing.astype(dtype).reshape(1, K, N // K, 1, 1)
    p, lse = softmax(x, seen, nothing)
    out = jnp.einsum("bkgts,bksh->bkgth", p, v_)
    measured = tuple(column(spec, p, x, seen, q_pos, kv_pos, logits, nothing) for spec in columns)
    return Attention(out.reshape(B, N, T, -1), lse.reshape(B, N, T), measured)


def softmax(x, seen, nothing=None):
    """Probabilities and logsumexp of masked logits, beside one for nothing; zeros and -inf for a row that sees none."""
    x = jnp.where(seen[:, :, None], x, -jnp.inf)
    least = jnp.finfo(x.dtype).min if nothing is None else nothing
    top = jnp.maximum(x.max(-1, keepdims=True), least)  # finite, so such a row is not NaN
    e = jnp.exp(x - top)
    mass = e.sum(-1, keepdims=True) + (0.0 if nothing is None else jnp.exp(nothing - top))
    return e / jnp.where(mass > 0, mass, 1.0), (top + jnp.log(mass))[..., 0]


def column(spec: Columns, p, x, seen, q_pos, kv_pos, logits: Logits, nothing=None):
    """One statistic of the matrix `p` "B K G T S", or of another softmax of the same logits `x`."""
    B, K, G, T, _ = p.shape
    own = spec.softmax
    if own is not None:
        if not own.causal:
            seen = logits.visible(q_pos, kv_pos, causal=False)
        if own.before is not None:
            seen = seen & (kv_pos[:, :, None] < own.before[:, None, None, None])
        if own.noise is not None:
            seed = None if own.seed is None else own.seed[:, None, None, None, None]
            head = head_numbers(own, K * G).reshape(1, K, G, 1, 1)
            noise = draw_noise(own, seed, head, q_pos[:, None, None, :, None], kv_pos[:, :, None, None, :])
            x = x + jnp.asarray(noise, x.dtype)
        if own.multiplier is not None:
            multiplier = own.multiplier[:, :, None, :, None].astype(p.dtype)
            x, nothing = rescaled(x, multiplier), None if nothing is None else nothing * multiplier
        p, _ = softmax(x, seen, nothing)
    if not spec.count_self:
        p = jnp.where(q_pos[:, None, None, :, None] == kv_pos[:, :, None, None, :], 0.0, p)

    weight = jnp.ones((B, T), p.dtype) if spec.weight is None else spec.weight.astype(p.dtype)
    if spec.rows is not None:
        weight = jnp.where((jnp.arange(T) >= T - spec.rows)[None], weight, 0.0)
    theta = thresholds(spec, q_pos, seen.sum(-1), p.dtype)
    if spec.group is not None and spec.group_at == "before":
        p = reduce_group(p, spec.group, axis=2)
        f = apply_element(p, spec, None if theta is None else theta[..., None]) * weight[:, None, :, None]
    else:
        f = apply_element(p, spec, None if theta is None else theta[:, :, None, :, None])
        f = f * weight[:, None, None, :, None]
    f = f.sum(-2) if spec.summed else f[..., T - min(T, spec.rows or T) :, :]
    if spec.group is None:
        return f.reshape(B, K * G, *f.shape[3:])
    return f if spec.group_at == "before" else reduce_group(f, spec.group, axis=2)


def pooled_attention(
    q: Float[Array, "B N 1 H"],
    k: Float[Array, "B P H"],
    v: Float[Array, "B P H"],
    owner: Int[Array, "B P"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B P"],
    bias: Float[Array, "B G P"] | None = None,
    nothing: Float[Array, "N"] | None = None,
    *,
    num_kv_heads: int,
    in_order: bool = False,
    columns: Sequence[Columns] = (),
    logits: Logits,
) -> Attention:
    """`kvjax.pallas_kernels.pooled_attention` over a dense cache as long as the pool: slots of other heads are dead."""
    del in_order
    K = num_kv_heads
    mine = owner[:, None] == jnp.arange(K, dtype=owner.dtype)[None, :, None]
    dense = lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], K, *x.shape[1:]))
    pos = jnp.where(mine, kv_pos[:, None], -1)
    bias = None if bias is None else dense(bias).reshape(q.shape[0], q.shape[1], -1)
    found = attention(q, dense(k), dense(v), q_pos, pos, bias, nothing, columns=columns, logits=logits)

    def gather(x):
        """Every slot's number from "B K ... P", one kv head's axis gone."""
        return jnp.where(mine.reshape(*mine.shape[:2], *(1,) * (x.ndim - 3), -1), x, 0.0).sum(1)

    split = lambda x: x.reshape(x.shape[0], K, -1, *x.shape[2:])
    measured = tuple(gather(split(x) if c.group is None else x) for c, x in zip(columns, found.columns, strict=True))
    return Attention(found.out, found.lse, measured)


def recovered_attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    masks: Bool[Array, "M B K S"],
    bands: tuple[Int[Array, "B"] | None, ...],
    bias: Float[Array, "B N S"] | None = None,
    *,
    tolerance: float | None,
    logits: Logits,
) -> Recovery:
    """`kvjax.pallas_kernels.recovered_attention` with the whole matrix: the specification."""
    rows = Columns(group=None, summed=False)
    (p,) = attention(q, k, k, q_pos, kv_pos, bias, columns=(rows,), logits=logits).columns
    p = p.reshape(*kv_pos.shape[:2], -1, *p.shape[2:]).mean(2)
    seen = logits.visible(q_pos, kv_pos)
    mass, same = [], []
    for mask, band in zip(masks, bands, strict=True):
        kept = jnp.broadcast_to(mask[:, :, None], seen.shape)
        if band is not None:
            kept |= q_pos[:, None, :, None] - kv_pos[:, :, None] < band[:, None, None, None]
        of_row = jnp.where(kept, p, 0.0).sum(-1, keepdims=True)
        after = jnp.where(kept, p / jnp.where(of_row > 0, of_row, 1.0), 0.0)
        mass.append(of_row.sum((2, 3)))
        if tolerance is not None:
            same.append((seen & (jnp.abs(after - p) < tolerance)).sum((2, 3)).astype(p.dtype))
    num_rows, num_seen = (
        jnp.maximum(x, 1).astype(p.dtype)[..., None] for x in (seen.any(-1).sum(-1), seen.sum((2, 3)))
    )
    recovered = jnp.stack(mass, -1) / num_rows
    return Recovery(recovered, jnp.stack(same, -1) / num_seen if same else None)
