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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.columns import (
    Attention,
    Columns,
    Softmax,
    accumulator,
    apply_element,
    draw_noise,
    head_numbers,
    reduce_group,
    rescaled,
    thresholds,
)

BLOCK_BYTES = 8 * 2**20  # the logits of one block; larger blocks fall out of cache, smaller ones starve the matmul
MIN_BLOCK, MAX_BLOCK = 32, 128
MAX_SEGMENTS = 8


@dataclasses.dataclass(frozen=True)
class _Config:
    """Everything static about one call."""

    scale: float
    window: int | None
    softcap: float | None
    block: int
    together: int  # sequences in a block
    num_slots: int
    num_rows: int  # padded to a multiple of `block`
    pad: int  # how many of them are padding, at the end
    offset: int  # row i may see slots up to offset + i

    def prefix(self, stop: int) -> int:
        """How many slots the rows before block `stop` may see."""
        return min(self.num_slots, self.offset + stop * self.block)

    def segments(self, columns: Sequence[Columns]) -> list[tuple[int, int, tuple[int, ...]]]:
        """(first block, last block, columns measured there) for every segment."""
        n = self.num_rows // self.block
        cuts = {round(i * n / MAX_SEGMENTS) for i in range(MAX_SEGMENTS + 1)}
        last = self.num_rows - self.pad
        starts = [0 if c.rows is None else max(0, (last - c.rows) // self.block) for c in columns]
        bounds = sorted(cuts | set(starts))
        return [(lo, hi, tuple(i for i, s in enumerate(starts) if s <= lo)) for lo, hi in itertools.pairwise(bounds)]


def block_size(batch: int, num_query_heads: int, num_rows: int, num_slots: int) -> tuple[int, int]:
    """(rows, sequences) in a block, such that its logits fit `BLOCK_BYTES`.

    Rows are a power of two between 32 and 128, or all there are; sequences divide the batch.
    """
    row_bytes = 4 * num_query_heads * num_slots
    block = MAX_BLOCK
    while block > MIN_BLOCK and row_bytes * block > BLOCK_BYTES:
        block //= 2
    block = min(block, num_rows)
    fits = lambda n: n == 1 or n * row_bytes * block <= BLOCK_BYTES
    return block, max(n for n in range(1, batch + 1) if batch % n == 0 and fits(n))


def attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    bias: Float[Array, "B N S"] | None = None,
    *,
    columns: Sequence[Columns] = (),
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    block: tuple[int, int] | None = None,
) -> Attention:
    """See `pallas_kernels.attention`. `block` overrides `block_size`."""
    B, N, T, H = q.shape
    K, S = k.shape[1:3]
    rows, together = block_size(B, N, T, S) if block is None else block
    pad = -T % rows
    config = _Config(scale, window, softcap, rows, together, S, T + pad, pad, S - T)
    if pad:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0)))
        q_pos = jnp.pad(q_pos, ((0, 0), (0, pad)), constant_values=-1)
    grouped = q.reshape(B, K, N // K, T + pad, H)
    arrays, structure = jax.tree.flatten(tuple(columns))
    if bias is not None:
        bias = bias.reshape(B, K, N // K, S).astype(accumulator(q.dtype))
    out, lse, measured = _compiled(config, structure, grouped, k, v, q_pos, kv_pos, bias, arrays)
    return Attention(out.reshape(B, N, T + pad, H)[:, :, :T], lse.reshape(B, N, T + pad)[:, :, :T], measured)


def _logits(config: _Config, q, k, q_pos, kv_pos, bias, causal=True):
    """Masked logits of a block of rows "B K G R S", the mask "B K R S", and the capped logits before bias and mask."""
    B, K, G, R, H = q.shape
    dtype = accumulator(q.dtype)
    x = jnp.einsum("bkrh,bksh->bkrs", q.reshape(B, K, G * R, H), k, preferred_element_type=dtype)
    x = x.reshape(B, K, G, R, -1) * jnp.asarray(config.scale, dtype)
    if config.softcap is not None:
        x = config.softcap * jnp.tanh(x / config.softcap)
    rows, keys = q_pos[:, None, :, None], kv_pos[:, :, None, :]
    seen = (keys >= 0) & (keys <= rows if causal else rows >= 0)
    if config.window is not None:
        seen &= rows - keys < config.window
    biased = x if bias is None else x + bias[:, :, :, None]
    return jnp.where(seen[:, :, None], biased, -jnp.inf), seen, x


def _measure(spec: Columns, e, inverse_mass, weight, theta):
    """One block's share of a column statistic; `e * inverse_mass` are its probabilities.

    Every sum over rows is a batched vector-matrix product, and the heads of a group are combined one by one: reductions
    over middle axes are an order of magnitude slower on CPU.
    """
    G = e.shape[2]
    if not spec.summed:
        p = e * inverse_mass[..., None]
        p = reduce_group(p, spec.group, axis=2) if spec.group is not None and spec.group_at == "before" else p
        theta = theta if theta is None or p.ndim == 4 else theta[:, :, None]
        f = apply_element(p, spec, None if theta is None else theta[..., None])
        f = f * jnp.broadcast_to(weight[:, None, :, None] if p.ndim == 4 else weight[:, None, None, :, None], f.shape)
        return f.sum(2) / (G if spec.group == "mean" else 1) if p.ndim == 5 and not spec.per_query_head else f
    if spec.element == "p" and spec.group in ("mean", "sum") and spec.group_at == "after":
        factor = inverse_mass * weight[:, None, None]
        return jnp.einsum("bkgr,bkgrs->bks", factor / G if spec.group == "mean" else factor, e)
    if spec.group is not None and spec.group_at == "before":
        heads = [e[:, :, g] * inverse_mass[:, :, g, :, None] for g in range(G)]
        p = functools.reduce(jnp.maximum if spec.group == "max" else jnp.add, heads)
        p = p / G if spec.group == "mean" else p
        f = apply_element(p, spec, None if theta is None else theta[..., None])
        return jnp.einsum("bkr,bkrs->bks", jnp.broadcast_to(weight[:, None], f.shape[:3]), f)
    if spec.element == "p":
        return jnp.einsum("bkgr,bkgrs->bkgs", inverse_mass * weight[:, None, None], e)
    f = apply_element(e * inverse_mass[..., None], spec, None if theta is None else theta[:, :, None, :, None])
    return jnp.einsum("bkgr,bkgrs->bkgs", jnp.broadcast_to(weight[:, None, None], f.shape[:4]), f)


def _loop(start, stop, body, carry):
    """`fori_loop`, or the body itself for a single step: decoding has no loop to pay for."""
    return body(start, carry) if stop - start == 1 else lax.fori_loop(start, stop, body, carry)


def _sequences(x, b, together):
    """Sequences `b * together ...` of `x`."""
    return lax.dynamic_slice_in_dim(x, b * together, together, 0)


def _read(x, b, together, i, block, axis):
    """The `i`-th block along `axis` of some sequences."""
    return lax.dynamic_slice_in_dim(_sequences(x, b, together), i * block, block, axis)


def _write(x, new, b, together, i, block, axis):
    start = [jnp.int32(0)] * x.ndim
    start[0], start[axis] = jnp.int32(b * together), jnp.int32(i * block)
    return lax.dynamic_update_slice(x, new, start)


def _zeros(shape, dtype, after):
    """Zeros that cannot exist before `after` does.

    Plain zeros depend on nothing, so XLA would make those of every layer of a model before the first layer runs.
    """
    return jnp.broadcast_to((after[(0,) * after.ndim] > jnp.inf).astype(dtype), shape)


def _add_prefix(x, new, b, together):
    """Adds to the first slots of some sequences, in place."""
    start = [jnp.int32(0)] * x.ndim
    start[0] = jnp.int32(b * together)
    old = lax.dynamic_slice(x, start, new.shape)
    return lax.dynamic_update_slice(x, old + new, start)


def _keys(x, b, together, width):
    """The first slots of some sequences, of an array whose last axis they are, or of none."""
    return None if x is None else _sequences(x, b, together)[..., :width]


def _forward(config: _Config, structure, q, k, v, q_pos, kv_pos, bias, arrays):
    """Output, logsumexp and every statistic: in one pass where the output's own softmax is asked for."""
    columns = jax.tree.unflatten(structure, arrays)
    out, lse, measured = _fused(config, [c for c in columns if c.fused], q, k, v, q_pos, kv_pos, bias)
    measured = iter(measured)
    alone = lambda c: _separate(config, c, q, k, q_pos, kv_pos, bias)
    return out, lse, tuple(next(measured) if c.fused else alone(c) for c in columns)


def _weight(config: _Config, spec: Columns, b, i, rows, dtype):
    """The weights "B R" of a block of rows; padding and rows that do not count get 0."""
    bb, bq = config.together, config.block
    if spec.weight is None:
        w = jnp.ones(rows.shape, dtype)
    else:
        padded = jnp.pad(spec.weight, ((0, 0), (0, config.pad)))
        w = _read(padded, b, bb, i, bq, 1).astype(dtype)
    if spec.rows is not None:
        counts = i * bq + jnp.arange(bq) >= config.num_rows - config.pad - spec.rows
        w = jnp.where(counts[None], w, 0.0)
    return w


def _separate(config: _Config, spec: Columns, q, k, q_pos, kv_pos, bias):
    """One statistic in a pass of its own: another softmax than the output's, or rows that are not summed."""
    B, K, G, T, _ = q.shape
    bb, bq = config.together, config.block
    dtype = accumulator(q.dtype)
    own = Softmax() if spec.softmax is None else spec.softmax
    heads = (B, K, G) if spec.per_query_head else (B, K)
    num_rows = T - config.pad
    first = 0 if spec.rows is None else max(0, num_rows - spec.rows)
    rows_axis = () if spec.summed else (T - first // bq * bq,)
    total = _zeros((*heads, *rows_axis, config.num_slots), dtype, k)
    head = head_numbers(own, K * G).reshape(1, K, G, 1, 1)

    for lo, hi, active in config.segments((spec,)):
        if not active:
            continue
        width = config.prefix(hi) if own.causal else config.num_slots

        def each(b, total, lo=lo, hi=hi, width=width):
            k_, kv_pos_ = (_sequences(x, b, bb)[:, :, :width] for x in (k, kv_pos))
            bias_ = _keys(bias, b, bb, width)

            def block(i, total):
                rows = _read(q_pos, b, bb, i, bq, 1)
                _, seen, x = _logits(config, _read(q, b, bb, i, bq, 3), k_, rows, kv_pos_, None, own.causal)
                x = x if bias_ is None else x + bias_[:, :, :, None]
                if own.before is not None:
                    seen &= kv_pos_[:, :, None] < _sequences(own.before, b, bb)[:, None, None, None]
                if own.noise is not None:
                    seed = None if own.seed is None else _sequences(own.seed, b, bb)[:, None, None, None, None]
                    noise = draw_noise(own, seed, head, rows[:, None, None, :, None], kv_pos_[:, :, None, None, :])
                    x = x + jnp.asarray(noise, x.dtype)
                if own.multiplier is not None:
                    padded = jnp.pad(own.multiplier, ((0, 0), (0, 0), (0, config.pad)))
                    multiplier = _read(padded, b, bb, i, bq, 2)[:, :, None, :, None].astype(dtype)
                    x = x * multiplier if bias_ is None else rescaled(x, multiplier)
                x = jnp.where(seen[:, :, None], x, -jnp.inf)
                e = jnp.exp(x - jnp.maximum(x.max(-1, keepdims=True), jnp.finfo(dtype).min))
                mass = e.sum(-1)
                inverse_mass = 1.0 / jnp.where(mass > 0, mass, 1.0)
                theta = thresholds(spec, rows, seen.sum(-1), dtype)
                if not spec.count_self:
                    itself = rows[:, None, None, :, None] == kv_pos_[:, :, None, None, :]
                    e = jnp.where(itself, 0.0, e)
                f = _measure(spec, e, inverse_mass, _weight(config, spec, b, i, rows, dtype), theta)
                if spec.summed:
                    return _add_prefix(total, f, b, bb)
                start = [jnp.int32(0)] * total.ndim
                start[0], start[-2] = jnp.int32(b * bb), jnp.int32((i - first // bq) * bq)
                return lax.dynamic_update_slice(total, f, start)

            return _loop(lo, hi, block, total)

        total = _loop(0, B // bb, each, total)
    if not spec.summed:
        total = total[..., first % bq : first % bq + num_rows - first, :]
    return spec.finish(total)


def _fused(config: _Config, columns, q, k, v, q_pos, kv_pos, bias):
    B, K, G, T, _ = q.shape
    dtype = accumulator(q.dtype)
    bb, bq = config.together, config.block
    shape = lambda c: (B, K, G, config.num_slots) if c.per_query_head else (B, K, config.num_slots)
    carry = (q, _zeros((B, K, G, T), dtype, k), [_zeros(shape(c), dtype, k) for c in columns])

    for lo, hi, active in config.segments(columns):
        width = config.prefix(hi)

        def each(b, carry, lo=lo, hi=hi, active=active, width=width):
            k_, v_, kv_pos_ = (_sequences(x, b, bb)[:, :, :width] for x in (k, v, kv_pos))
            bias_ = _keys(bias, b, bb, width)

            def block(i, carry):
                out, lse, sums = carry
                rows = _read(q_pos, b, bb, i, bq, 1)
                x, seen, _ = _logits(config, _read(out, b, bb, i, bq, 3), k_, rows, kv_pos_, bias_)
                top = jnp.maximum(x.max(-1, keepdims=True), jnp.finfo(dtype).min)  # finite where a row sees nothing
                e = jnp.exp(x - top)
                mass = e.sum(-1)
                inverse_mass = 1.0 / jnp.where(mass > 0, mass, 1.0)
                o = jnp.einsum("bkgrs,bksh->bkgrh", e.astype(v_.dtype), v_, preferred_element_type=dtype)
                o = (o * inverse_mass[..., None]).astype(out.dtype)
                sums = list(sums)
                for j in active:
                    spec = columns[j]
                    w = _weight(config, spec, b, i, rows, dtype)
                    theta = thresholds(spec, rows, seen.sum(-1), dtype)
                    sums[j] = _add_prefix(sums[j], _measure(spec, e, inverse_mass, w, theta), b, bb)
                out = _write(out, o, b, bb, i, bq, 3)
                return out, _write(lse, top[..., 0] + jnp.log(mass), b, bb, i, bq, 3), sums

            return _loop(lo, hi, block, carry)

        carry = _loop(0, B // bb, each, carry)
    out, lse, sums = carry
    return out, lse, tuple(c.finish(s) for c, s in zip(columns, sums, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(config: _Config, structure, q, k, v, q_pos, kv_pos, bias, arrays):
    return _forward(config, structure, q, k, v, q_pos, kv_pos, bias, arrays)


def _attention_fwd(config, structure, q, k, v, q_pos, kv_pos, bias, arrays):
    q, k, v, q_pos, kv_pos, bias, arrays = jax.tree.map(
        lambda x: x.value, (q, k, v, q_pos, kv_pos, bias, arrays), is_leaf=lambda x: hasattr(x, "perturbed")
    )
    out, lse, measured = _forward(config, structure, q, k, v, q_pos, kv_pos, bias, arrays)
    return (out, lse, measured), (q, k, v, q_pos, kv_pos, bias, out, lse)


def _attention_bwd(config, structure, residuals, cotangents):
    """Recomputes every block from its logsumexp (FlashAttention's backward pass), in place like the forward."""
    del structure
    q, k, v, q_pos, kv_pos, bias, out, lse = residuals
    d_out, d_lse, d_measured = cotangents
    if not all(isinstance(d, jax.custom_derivatives.SymbolicZero) for d in jax.tree.leaves(d_measured)):
        raise NotImplementedError(
            "column statistics have no gradient here: they rank tokens. Use implementation='reference' to "
            "differentiate through them, or lax.stop_gradient to say that you do not mean to"
        )
    dtype = accumulator(q.dtype)
    zeros = lambda d, like: jnp.zeros(like.shape, dtype) if isinstance(d, jax.custom_derivatives.SymbolicZero) else d
    d_out, d_lse = zeros(d_out, out).astype(dtype), zeros(d_lse, lse).astype(dtype)
    delta = jnp.einsum("bkgth,bkgth->bkgt", d_out, out.astype(dtype)) - d_lse
    finite_lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    bb, bq = config.together, config.block
    carry: Any = (q, *(None if x is None else jnp.zeros(x.shape, dtype) for x in (k, v, bias)))
    for lo, hi, _ in config.segments(()):
        width = config.prefix(hi)

        def each(b, carry, lo=lo, hi=hi, width=width):
            dq, dk, dv, dbias = carry
            k_, v_, kv_pos_ = (_sequences(x, b, bb)[:, :, :width] for x in (k, v, kv_pos))
            bias_ = _keys(bias, b, bb, width)

            def block(i, carry):
                dq, dk, dv, dbias = carry
                qi = _read(dq, b, bb, i, bq, 3)
                x, _, capped = _logits(config, qi, k_, _read(q_pos, b, bb, i, bq, 1), kv_pos_, bias_)
                p = jnp.exp(x - _read(finite_lse, b, bb, i, bq, 3)[..., None])
                do = _read(d_out, b, bb, i, bq, 3)
                dv = dv + jnp.einsum("bkgrs,bkgrh->bksh", p, do)
                dp = jnp.einsum("bkgrh,bksh->bkgrs", do, v_.astype(dtype))
                dx = p * (dp - _read(delta, b, bb, i, bq, 3)[..., None])
                dbias = None if dbias is None else dbias + dx.sum(3)
                if config.softcap is not None:
                    dx = dx * (1.0 - (capped / config.softcap) ** 2)
                dx = dx * jnp.asarray(config.scale, dtype)
                dk = dk + jnp.einsum("bkgrs,bkgrh->bksh", dx, qi.astype(dtype))
                dqi = jnp.einsum("bkgrs,bksh->bkgrh", dx, k_.astype(dtype)).astype(dq.dtype)
                return _write(dq, dqi, b, bb, i, bq, 3), dk, dv, dbias

            start = (dq, *(None if x is None else jnp.zeros(x.shape, dtype) for x in (k_, v_, bias_)))
            dq, dk_, dv_, dbias_ = _loop(lo, hi, block, start)
            dbias = None if dbias is None else _add_prefix(dbias, dbias_, b, bb)
            return dq, _add_prefix(dk, dk_, b, bb), _add_prefix(dv, dv_, b, bb), dbias

        carry = _loop(0, k.shape[0] // bb, each, carry)
    dq, dk, dv, dbias = carry
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None, dbias, None


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)
_compiled = jax.jit(_attention, static_argnums=(0, 1))  # called eagerly, its loops would be compiled at every call
