"""How much of an attention matrix survives when only some keys are kept, in blocks of rows, for XLA.

Letters: B batch, N query heads, K kv heads, G = N // K, T query rows, S slots (keys), H head_dim, M sets of keys.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.pallas_kernels.columns import Recovery, accumulator
from kvjax.pallas_kernels.logits import Logits
from kvjax.pallas_kernels.loops import MAX_SEGMENTS
from kvjax.pallas_kernels.xla import block_size


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
    """`kvjax.pallas_kernels.recovered_attention` in XLA. Memory grows with the slots of one block of rows."""
    B, N, T, H = q.shape
    K, S = k.shape[1:3]
    M, G = masks.shape[0], N // K
    dtype = accumulator(q.dtype)
    R, together = block_size(B, N, T, S)
    pad = -T % R
    q = jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0))).reshape(B, K, G, T + pad, H)
    q_pos = jnp.pad(q_pos, ((0, 0), (0, pad)), constant_values=-1)
    bias = None if bias is None else bias.reshape(B, K, G, 1, S).astype(dtype)
    num_blocks = (T + pad) // R
    cuts = sorted({round(i * num_blocks / MAX_SEGMENTS) for i in range(MAX_SEGMENTS + 1)})

    def sequence(args):
        """Sums of one sequence: (mass "K M", unchanged entries "K M", rows that see anything "K", visible "K")."""
        q, k, q_pos, kv_pos, masks, bands, bias = args
        sums = (jnp.zeros((K, M), dtype), jnp.zeros((K, M), dtype), jnp.zeros((K,), dtype), jnp.zeros((K,), dtype))
        for lo, hi in itertools.pairwise(cuts):
            width = min(S, S - T + hi * R)  # later slots lie behind these rows

            def block(i, sums, width=width):
                rows = lax.dynamic_slice_in_dim(q_pos, i * R, R)[None, :, None]
                keys = kv_pos[:, None, :width]
                here = lax.dynamic_slice_in_dim(q, i * R, R, 2).reshape(K, G * R, H)
                # Zero, but not before the last block is done: XLA would otherwise hold several blocks at once.
                here = here + (sums[0][:, :1, None] > jnp.inf).astype(q.dtype)
                x = jnp.einsum("krh,ksh->krs", here, k[:, :width], preferred_element_type=dtype)
                x = logits.of(x.reshape(K, G, R, width), H)
                x = x if bias is None else x + bias[..., :width]
                seen = (keys >= 0) & (keys <= rows)
                seen = seen if logits.window is None else seen & (rows - keys < logits.window)
                x = jnp.where(seen[:, None], x, -jnp.inf)
                e = jnp.exp(x - jnp.maximum(x.max(-1, keepdims=True), jnp.finfo(dtype).min))
                total = e.sum(-1)
                share = 1.0 / (G * jnp.where(total > 0, total, 1.0))  # e * share is a head's part of the group's mean
                near = [None if band is None else rows - keys < band for band in bands]
                # Sums over rows are matrix products and heads are added one by one: on CPU far faster than reductions.
                columns = [jnp.einsum("kgr,kgrs->ks", share, e)]
                columns += [
                    jnp.zeros_like(columns[0])
                    if n is None
                    else jnp.einsum("kgr,kgrs->ks", share, jnp.where(n[:, None], e, 0.0))
                    for n in near
                ]
                mass = [
                    jnp.where(mask[:, :width], columns[0], close).sum(-1)
                    for mask, close in zip(masks, columns[1:], strict=True)
                ]
                unchanged = [jnp.zeros((K,), dtype)] * M
                if tolerance is not None:
                    p = functools.reduce(jnp.add, [e[:, g] * share[:, g, :, None] for g in range(G)])
                    small = seen & (p < tolerance)
                    for m, (mask, n) in enumerate(zip(masks, near, strict=True)):
                        kept = jnp.broadcast_to(mask[:, None, :width], p.shape)
                        kept = kept if n is None else kept | n
                        of_row = jnp.where(kept, p, 0.0).sum(-1, keepdims=True)
                        growth = jnp.abs(1.0 / jnp.where(of_row > 0, of_row, 1.0) - 1.0)
                        same = jnp.where(kept, seen & (p * growth < tolerance), small)
                        unchanged[m] = same.sum((-2, -1)).astype(dtype)
                new = (
                    jnp.stack(mass, -1),
                    jnp.stack(unchanged, -1),
                    seen.any(-1).sum(-1).astype(dtype),
                    seen.sum((-2, -1)).astype(dtype),
                )
                return jax.tree.map(jnp.add, sums, new)

            sums = lax.fori_loop(lo, hi, block, sums)
        return sums

    arguments = q, k, q_pos, kv_pos, masks.swapaxes(0, 1), bands, bias
    mass, unchanged, num_rows, visible = lax.map(sequence, arguments, batch_size=together)
    mass = mass / jnp.maximum(num_rows, 1)[..., None]
    if tolerance is None:
        return Recovery(mass, None)
    return Recovery(mass, unchanged / jnp.maximum(visible, 1)[..., None])
