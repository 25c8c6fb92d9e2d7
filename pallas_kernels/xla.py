"""Attention and its column statistics in one pass over blocks of query rows, for XLA on CPU and TPU.

Three facts shape this file; `experiments/bench_prefill.py` measures them.

* A block of rows holds its whole softmax, so column sums cost a matrix-vector product on numbers that are already in
  cache: a few percent of attention, where a second pass over the matrix would cost half of it again.
* Rows are cut into a few segments with static key prefixes, so that the upper triangle is never computed.
* Blocks are written in place over the queries they were read from. A loop that stacks its outputs starts from a
  buffer of zeros, and XLA makes those buffers for all layers of a model before the first one runs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.columns import Attention, Columns, accumulator, apply_element, reduce_group, thresholds

BLOCK_BYTES = 32 * 2**20  # the logits of one block; larger blocks fall out of cache, smaller ones starve the matmul
MIN_BLOCK, MAX_BLOCK = 32, 128
MAX_SEGMENTS = 8


@dataclasses.dataclass(frozen=True)
class _Config:
    """Everything static about one call."""

    scale: float
    window: int | None
    softcap: float | None
    block: int
    num_slots: int
    num_rows: int  # padded to a multiple of `block`
    offset: int  # row i may see slots up to offset + i

    def prefix(self, stop: int) -> int:
        """How many slots the rows before block `stop` may see."""
        return min(self.num_slots, self.offset + stop * self.block)

    def segments(self, columns: Sequence[Columns], pad: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """(first block, last block, columns measured there) for every segment."""
        n = self.num_rows // self.block
        cuts = {round(i * n / MAX_SEGMENTS) for i in range(MAX_SEGMENTS + 1)}
        starts = [0 if c.rows is None else max(0, (self.num_rows - pad - c.rows) // self.block) for c in columns]
        bounds = sorted(cuts | set(starts))
        return [(lo, hi, tuple(i for i, s in enumerate(starts) if s <= lo)) for lo, hi in itertools.pairwise(bounds)]


def block_size(batch: int, num_query_heads: int, num_rows: int, num_slots: int) -> int:
    """Rows in a block: a power of two between 32 and 128 whose logits fit `BLOCK_BYTES`."""
    block = MAX_BLOCK
    while block > MIN_BLOCK and 4 * batch * num_query_heads * block * num_slots > BLOCK_BYTES:
        block //= 2
    return min(block, num_rows)


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
    block: int | None = None,
) -> Attention:
    """See `pallas_kernels.attention`. `block` overrides `block_size`."""
    B, N, T, H = q.shape
    K, S = k.shape[1:3]
    block = block_size(B, N, T, S) if block is None else min(block, T)
    pad = -T % block
    config = _Config(scale, window, softcap, block, S, T + pad, S - T)
    columns = tuple(columns)
    weights = tuple(c.weight for c in columns)
    columns = tuple(dataclasses.replace(c, weight=None) for c in columns)
    if pad:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0)))
        q_pos = jnp.pad(q_pos, ((0, 0), (0, pad)), constant_values=-1)
        weights = tuple(None if w is None else jnp.pad(w, ((0, 0), (0, pad))) for w in weights)
    grouped = q.reshape(B, K, N // K, T + pad, H)
    out, lse, measured = _attention(config, columns, pad, grouped, k, v, q_pos, kv_pos, weights)
    return Attention(out.reshape(B, N, T + pad, H)[:, :, :T], lse.reshape(B, N, T + pad)[:, :, :T], measured)


def _logits(config: _Config, q, k, q_pos, kv_pos):
    """Masked logits of a block of rows "B K G R S", the mask "B K R S", and the capped logits before the mask."""
    B, K, G, R, H = q.shape
    dtype = accumulator(q.dtype)
    x = jnp.einsum("bkrh,bksh->bkrs", q.reshape(B, K, G * R, H), k, preferred_element_type=dtype)
    x = x.reshape(B, K, G, R, -1) * jnp.asarray(config.scale, dtype)
    if config.softcap is not None:
        x = config.softcap * jnp.tanh(x / config.softcap)
    rows, keys = q_pos[:, None, :, None], kv_pos[:, :, None, :]
    seen = (keys >= 0) & (keys <= rows)
    if config.window is not None:
        seen &= rows - keys < config.window
    return jnp.where(seen[:, :, None], x, -jnp.inf), seen, x


def _measure(spec: Columns, e, inverse_mass, weight, theta):
    """One block's share of a column statistic; `e * inverse_mass` are its probabilities."""
    if spec.element == "p" and (spec.group in ("mean", "sum") and spec.group_at == "after"):
        factor = inverse_mass * weight[:, None, None]
        if spec.group == "mean":
            factor = factor / e.shape[2]
        return jnp.einsum("bkgr,bkgrs->bks", factor, e)
    if spec.group is not None and spec.group_at == "before":
        p = reduce_group(e * inverse_mass[..., None], spec.group, axis=2)
        f = apply_element(p, spec, None if theta is None else theta[..., None])
        return jnp.einsum("br,bkrs->bks", weight, f)
    if spec.element == "p":
        return jnp.einsum("bkgr,bkgrs->bkgs", inverse_mass * weight[:, None, None], e)
    f = apply_element(e * inverse_mass[..., None], spec, None if theta is None else theta[:, :, None, :, None])
    return jnp.einsum("br,bkgrs->bkgs", weight, f)


def _rows(x, i, block, axis):
    return lax.dynamic_slice_in_dim(x, i * block, block, axis)


def _loop(lo, hi, body, carry):
    """`fori_loop`, or the body itself for a single block: decoding has no loop to pay for."""
    return body(lo, carry) if hi - lo == 1 else lax.fori_loop(lo, hi, body, carry)


def _forward(config: _Config, columns, pad, q, k, v, q_pos, kv_pos, weights):
    B, K, G, T, _ = q.shape
    dtype = accumulator(q.dtype)
    bq = config.block
    out, lse = q, jnp.zeros((B, K, G, T), dtype)
    shape = lambda c, width: (B, K, G, width) if c.per_query_head else (B, K, width)
    sums = [jnp.zeros(shape(c, config.num_slots), dtype) for c in columns]

    for lo, hi, active in config.segments(columns, pad):
        width = config.prefix(hi)
        k_, v_, kv_pos_ = k[:, :, :width], v[:, :, :width], kv_pos[:, :, :width]

        def body(i, carry, k_=k_, v_=v_, kv_pos_=kv_pos_, active=active):
            out, lse, acc = carry
            rows = _rows(q_pos, i, bq, 1)
            x, seen, _ = _logits(config, _rows(out, i, bq, 3), k_, rows, kv_pos_)
            top = jnp.maximum(x.max(-1, keepdims=True), jnp.finfo(dtype).min)  # finite where a row sees nothing
            e = jnp.exp(x - top)
            mass = e.sum(-1)
            inverse_mass = 1.0 / jnp.where(mass > 0, mass, 1.0)
            o = jnp.einsum("bkgrs,bksh->bkgrh", e.astype(v_.dtype), v_, preferred_element_type=dtype)
            o = (o * inverse_mass[..., None]).astype(out.dtype)
            added = []
            for j, a in zip(active, acc, strict=True):
                spec, w = columns[j], weights[j]
                w = jnp.ones(rows.shape, dtype) if w is None else _rows(w, i, bq, 1).astype(dtype)
                if spec.rows is not None:
                    w = jnp.where((i * bq + jnp.arange(bq) >= T - pad - spec.rows)[None], w, 0.0)
                theta = thresholds(spec, rows, seen.sum(-1), dtype)
                added.append(a + _measure(spec, e, inverse_mass, w, theta))
            out = lax.dynamic_update_slice_in_dim(out, o, i * bq, 3)
            lse = lax.dynamic_update_slice_in_dim(lse, top[..., 0] + jnp.log(mass), i * bq, 3)
            return out, lse, added

        acc = [jnp.zeros(shape(columns[j], width), dtype) for j in active]
        out, lse, acc = _loop(lo, hi, body, (out, lse, acc))
        for j, a in zip(active, acc, strict=True):
            sums[j] = sums[j].at[..., :width].add(a)
    measured = tuple(c.finish(s) for c, s in zip(columns, sums, strict=True))
    return out, lse, measured


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(config: _Config, columns, pad, q, k, v, q_pos, kv_pos, weights):
    return _forward(config, columns, pad, q, k, v, q_pos, kv_pos, weights)


def _attention_fwd(config, columns, pad, q, k, v, q_pos, kv_pos, weights):
    q, k, v, q_pos, kv_pos, weights = jax.tree.map(
        lambda x: x.value, (q, k, v, q_pos, kv_pos, weights), is_leaf=lambda x: hasattr(x, "perturbed")
    )
    out, lse, measured = _forward(config, columns, pad, q, k, v, q_pos, kv_pos, weights)
    return (out, lse, measured), (q, k, v, q_pos, kv_pos, weights, out, lse)


def _attention_bwd(config, columns, pad, residuals, cotangents):
    """Recomputes every block from its logsumexp (FlashAttention's backward pass), in place like the forward."""
    q, k, v, q_pos, kv_pos, weights, out, lse = residuals
    d_out, d_lse, d_measured = cotangents
    if not all(isinstance(d, jax.custom_derivatives.SymbolicZero) for d in jax.tree.leaves(d_measured)):
        raise NotImplementedError(
            "column statistics have no gradient here: they rank tokens. Use implementation='reference' to "
            "differentiate through them, or lax.stop_gradient to say that you do not mean to"
        )
    dtype = accumulator(q.dtype)
    zeros = lambda d, like: jnp.zeros(like.shape, dtype) if isinstance(d, jax.custom_derivatives.SymbolicZero) else d
    d_out, d_lse = zeros(d_out, out), zeros(d_lse, lse)
    delta = jnp.einsum("bkgth,bkgth->bkgt", d_out.astype(dtype), out.astype(dtype)) - d_lse.astype(dtype)
    finite_lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    B, K, _, _, H = q.shape
    bq = config.block
    dq, dk, dv = q, jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)
    for lo, hi, _ in config.segments((), pad):
        width = config.prefix(hi)
        k_, v_, kv_pos_ = k[:, :, :width], v[:, :, :width], kv_pos[:, :, :width]

        def body(i, carry, k_=k_, v_=v_, kv_pos_=kv_pos_):
            dq, dk, dv = carry
            qi = _rows(dq, i, bq, 3)
            x, _, capped = _logits(config, qi, k_, _rows(q_pos, i, bq, 1), kv_pos_)
            p = jnp.exp(x - _rows(finite_lse, i, bq, 3)[..., None])
            do = _rows(d_out, i, bq, 3).astype(dtype)
            dv = dv + jnp.einsum("bkgrs,bkgrh->bksh", p, do)
            dp = jnp.einsum("bkgrh,bksh->bkgrs", do, v_.astype(dtype))
            dx = p * (dp - _rows(delta, i, bq, 3)[..., None])
            if config.softcap is not None:
                dx = dx * (1.0 - (capped / config.softcap) ** 2)
            dx = dx * jnp.asarray(config.scale, dtype)
            dk = dk + jnp.einsum("bkgrs,bkgrh->bksh", dx, qi.astype(dtype))
            dqi = jnp.einsum("bkgrs,bksh->bkgrh", dx, k_.astype(dtype)).astype(dq.dtype)
            return lax.dynamic_update_slice_in_dim(dq, dqi, i * bq, 3), dk, dv

        start = (dq, jnp.zeros((B, K, width, H), dtype), jnp.zeros((B, K, width, v.shape[-1]), dtype))
        dq, dk_, dv_ = _loop(lo, hi, body, start)
        dk, dv = dk.at[:, :, :width].add(dk_), dv.at[:, :, :width].add(dv_)
    d_weights = jax.tree.map(jnp.zeros_like, weights)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None, d_weights


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)
