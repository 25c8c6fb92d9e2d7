"""Attention and its column statistics in loops over blocks of query rows, for XLA on CPU and TPU.

These facts shape this file; `experiments/bench/speed.py prefill` measures them.

* Rows that no statistic reads are an online softmax over tiles (`kvjax.pallas_kernels.tiles`).
* A block of rows that one reads holds its whole softmax, so column sums cost a matrix-vector product on numbers that
  are already in cache, where a second pass over the matrix would cost half of it again. Other softmaxes of the same
  logits, as Keyformer's, are taken from the same block.
* Every kv head of a sequence takes its turn where there is more than one block: its logits and keys stay in cache.
* Rows are cut into segments with static key prefixes, so that the upper triangle is never computed.
* Blocks are written in place over the queries they were read from. A loop that stacks its outputs starts from a
  buffer of zeros, and XLA makes those buffers for all layers of a model before the first one runs.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels.columns import (
    Attention,
    Columns,
    Softmax,
    accumulator,
    apply_element,
    draw_exponential,
    draw_noise,
    head_numbers,
    rescaled,
    thresholds,
)
from kvjax.pallas_kernels.logits import Logits, beside_nothing
from kvjax.pallas_kernels.loops import (
    Config,
    Tile,
    add_prefix,
    as_bits,
    first_keys,
    loop,
    masked,
    of_bits,
    read_block,
    sequences,
    write_block,
    zeros_after,
)
from kvjax.pallas_kernels.tiles import attend_tiles, num_cores, tile_size

BLOCK_BYTES = 8 * 2**20  # the logits of one block; larger blocks fall out of cache, smaller ones starve the matmul
HEAD_BYTES = 2 * 2**20  # the same where a block is of one set of slots
GPU_BYTES = 256 * 2**20  # either on a GPU, which small blocks leave idle: 11 ms in place of 43 at 8,192 slots (H200)
MIN_BLOCK, MAX_BLOCK = 32, 128
LEAST_BLOCK = 8  # of one core and one set of slots; several cores that share a block wait for each other after it


def block_size(
    batch: int,
    num_query_heads: int,
    num_rows: int,
    num_slots: int,
    limit: int = BLOCK_BYTES,
    least: int = MIN_BLOCK,
) -> tuple[int, int]:
    """(rows, sequences) in a block, such that its logits fit `limit` bytes.

    Rows are a power of two between `least` and 128, or all there are; sequences divide the batch. On a GPU `GPU_BYTES`
    takes the limit's place.
    """
    limit = GPU_BYTES if jax.default_backend() == "gpu" else limit
    row_bytes = 4 * num_query_heads * num_slots
    block = MAX_BLOCK
    while block > least and row_bytes * block > limit:
        block //= 2
    block = min(block, num_rows)
    fits = lambda n: n == 1 or n * row_bytes * block <= limit
    return block, max(n for n in range(1, batch + 1) if batch % n == 0 and fits(n))


def head_block_size(num_sets: int, group: int, num_rows: int, num_slots: int) -> tuple[int, int]:
    """(rows, sets of slots) in a block of `attention`; a set is one kv head of a sequence, with its query heads."""
    if num_rows < MIN_BLOCK:
        return block_size(num_sets, group, num_rows, num_slots)
    alone = num_cores() == 1 and jax.default_backend() == "cpu"
    return block_size(num_sets, group, num_rows, num_slots, HEAD_BYTES, LEAST_BLOCK if alone else MIN_BLOCK)


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
    block: tuple[int, int] | None = None,
    tile: tuple[int, int, int] | None = None,
) -> Attention:
    """`kvjax.pallas_kernels.attention` in XLA, by blocks of rows or tiles of rows and keys.

    `block` overrides `head_block_size`, and (rows, keys, sets of slots) of `tile` override `tile_size`.
    """
    B, N, T, H = q.shape
    K, S = k.shape[1:3]
    G = N // K
    rows, together = head_block_size(B * K, G, T, S) if block is None else block
    if G * T == 1 and q.dtype.itemsize == 2:  # XLA turns all keys and values into float32 for one row, not for two
        rows = 2
    pad = -T % rows
    if pad:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0)))
        q_pos = jnp.pad(q_pos, ((0, 0), (0, pad)), constant_values=-1)
    if bias is not None:
        bias = bias.reshape(B, K, G, S).astype(accumulator(q.dtype))
    beside = None
    if nothing is not None and columns:
        beside = jnp.broadcast_to(nothing.reshape(1, K, G), (B, K, G)).astype(accumulator(q.dtype))
    arrays: Any = q.reshape(B, K, G, T + pad, H), k, v, q_pos, kv_pos, bias, beside
    columns = tuple(columns)
    config = Config(logits, rows, together, K, S, T + pad, pad, S - T)
    unread = config.first_block([c for c in columns if c.fused]) * rows
    cut = tile_size(G, unread, S) if tile is None else Tile(*tile)
    if cut is None and together == B * K:  # nothing to cut: both axes stay, as a mesh may have divided them
        together = B
    else:
        arrays, columns = _by_set(arrays, columns)
    config = dataclasses.replace(config, together=together, tile=cut)
    *arrays, beside = arrays
    of_columns, structure = jax.tree.flatten((columns, beside))
    out, lse, measured = _compiled(config, structure, *arrays, of_columns)
    measured = tuple(x.reshape(B, -1, *x.shape[2:]) for x in measured)
    out, lse = out.reshape(B, N, T + pad, H)[:, :, :T], lse.reshape(B, N, T + pad)[:, :, :T]
    return Attention(*beside_nothing(out, lse, nothing), measured)


def _by_set(arrays, columns):
    """The arrays of `_attention` and columns with the sets of slots, one a kv head, as sequences of one kv head."""
    q, k, v, q_pos, kv_pos, bias, nothing = arrays
    K = k.shape[1]
    alone = lambda x: None if x is None else x.reshape(-1, 1, *x.shape[2:])
    each = lambda x: None if x is None else jnp.repeat(x, K, axis=0)

    def own(s):
        return dataclasses.replace(s, multiplier=alone(s.multiplier), seed=each(s.seed), before=each(s.before))

    columns = tuple(
        dataclasses.replace(c, weight=each(c.weight), softmax=None if c.softmax is None else own(c.softmax))
        for c in columns
    )
    return (alone(q), alone(k), alone(v), each(q_pos), alone(kv_pos), alone(bias), alone(nothing)), columns


def _measure(spec: Columns, e, inverse_mass, weight, theta):
    """One block's share of a column statistic; `e * inverse_mass` are its probabilities.

    Every sum over rows is a batched vector-matrix product, and the heads of a group are combined one by one: reductions
    over middle axes are an order of magnitude slower on CPU.
    """
    G = e.shape[2]

    def combined(heads):
        total = functools.reduce(jnp.maximum if spec.group == "max" else jnp.add, heads)
        return total / G if spec.group == "mean" else total

    if not spec.summed:
        heads = [e[:, :, g] * inverse_mass[:, :, g, :, None] for g in range(G)]
        before = spec.group is not None and spec.group_at == "before"
        measured = [
            apply_element(p, spec, None if theta is None else theta[..., None]) * weight[:, None, :, None]
            for p in ([combined(heads)] if before else heads)
        ]
        return jnp.stack(measured, axis=2) if spec.per_query_head else measured[0] if before else combined(measured)
    if spec.element == "p" and spec.group in ("mean", "sum") and spec.group_at == "after":
        factor = inverse_mass * weight[:, None, None]
        return jnp.einsum("bkgr,bkgrs->bks", factor / G if spec.group == "mean" else factor, e)
    if spec.group is not None and spec.group_at == "before":
        p = combined([e[:, :, g] * inverse_mass[:, :, g, :, None] for g in range(G)])
        f = apply_element(p, spec, None if theta is None else theta[..., None])
        return jnp.einsum("bkr,bkrs->bks", jnp.broadcast_to(weight[:, None], f.shape[:3]), f)
    if spec.element == "p":
        return jnp.einsum("bkgr,bkgrs->bkgs", inverse_mass * weight[:, None, None], e)
    f = apply_element(e * inverse_mass[..., None], spec, None if theta is None else theta[:, :, None, :, None])
    return jnp.einsum("bkgr,bkgrs->bkgs", jnp.broadcast_to(weight[:, None, None], f.shape[:4]), f)


def _forward(config: Config, structure, q, k, v, q_pos, kv_pos, bias, arrays):
    """Output, logsumexp and every statistic: in one pass where the output's logits are all that it needs."""
    columns, nothing = jax.tree.unflatten(structure, arrays)
    out, lse, measured = _fused(config, [c for c in columns if c.fused], q, k, v, q_pos, kv_pos, bias, nothing)
    measured = iter(measured)
    alone = lambda c: _separate(config, c, q, k, q_pos, kv_pos, bias, nothing)
    return out, lse, tuple(next(measured) if c.fused else alone(c) for c in columns)


def _weight(config: Config, spec: Columns, b, i, rows, dtype):
    """The weights "B R" of a block of rows; padding and rows that do not count get 0."""
    bb, bq = config.together, config.block
    if spec.weight is None:
        w = jnp.ones(rows.shape, dtype)
    else:
        padded = jnp.pad(spec.weight, ((0, 0), (0, config.pad)))
        w = read_block(padded, b, bb, i, bq, 1).astype(dtype)
    if spec.rows is not None:
        counts = i * bq + jnp.arange(bq) >= config.num_rows - config.pad - spec.rows
        w = jnp.where(counts[None], w, 0.0)
    return w


def _heads(config: Config, own: Softmax, q):
    """The query heads "B K G 1 1" by their numbers within a layer."""
    B, K, G = q.shape[:3]
    numbers = head_numbers(own, config.num_kv_heads * G).reshape(-1, G)
    return jnp.tile(numbers, (B * K // config.num_kv_heads, 1)).reshape(B, K, G, 1, 1)


def _inverse(mass, top, nothing, b, together, multiplier=None):
    """The inverse of the sums of exponentials of logits below `top` "B K G R 1", and of one for nothing."""
    if nothing is not None:
        beside = sequences(nothing, b, together)[..., None]
        beside = beside if multiplier is None else beside * multiplier[..., 0]
        mass = mass + jnp.exp(beside - top[..., 0])
    return 1.0 / jnp.where(mass > 0, mass, 1.0)


def _own(config: Config, own: Softmax, x, rows, kv_pos, head, nothing, b, i, of_output=None):
    """Exponentials of a block of masked logits in a softmax of a statistic's own, and the inverse of their sums.

    With those of the same logits in the output's softmax, and what was subtracted, a Gumbel's cost one division a
    number, unless the block has a multiplier other than 1.
    """
    bb, dtype = config.together, x.dtype
    seed = None if own.seed is None else sequences(own.seed, b, bb)[:, None, None, None, None]
    where = rows[:, None, None, :, None], kv_pos[:, :, None, None, :]
    multiplier = None
    if own.multiplier is not None:
        padded = jnp.pad(own.multiplier, ((0, 0), (0, 0), (0, config.pad)))
        multiplier = read_block(padded, b, bb, i, config.block, 2)[:, :, None, :, None].astype(dtype)

    def scaled():
        y = x if own.noise is None else x + jnp.asarray(draw_noise(own, seed, head, *where), dtype)
        y = y if multiplier is None else rescaled(y, multiplier)
        top = jnp.maximum(y.max(-1, keepdims=True), jnp.finfo(dtype).min)
        return jnp.exp(y - top), top

    if of_output is None or seed is None or own.noise != "gumbel" or (multiplier is not None and config.num_rows == 1):
        f = scaled()  # and what was subtracted
    else:
        divided = lambda: (of_output[0] / draw_exponential(own, seed, head, *where).astype(dtype), of_output[1])
        f = divided() if multiplier is None else lax.cond(jnp.all(multiplier == 1), divided, scaled)
    return f[0], _inverse(f[0].sum(-1), f[1], nothing, b, bb, multiplier)


def _separate(config: Config, spec: Columns, q, k, q_pos, kv_pos, bias, nothing):
    """One statistic in a pass of its own: other keys than the output's, or rows that are not summed."""
    B, K, G, T, _ = q.shape
    bb, bq = config.together, config.block
    dtype = accumulator(q.dtype)
    own = Softmax() if spec.softmax is None else spec.softmax
    heads = (B, K, G) if spec.per_query_head else (B, K)
    num_rows = T - config.pad
    first = 0 if spec.rows is None else max(0, num_rows - spec.rows)
    rows_axis = () if spec.summed else (T - first // bq * bq,)
    total = zeros_after((*heads, *rows_axis, config.num_slots), dtype, k)
    head = _heads(config, own, q)

    for lo, hi, active in config.segments((spec,)):
        if not active:
            continue
        width = config.prefix(hi) if own.causal else config.num_slots

        def each(b, total, lo=lo, hi=hi, width=width):
            k_, kv_pos_ = (sequences(x, b, bb)[:, :, :width] for x in (k, kv_pos))
            bias_ = first_keys(bias, b, bb, width)

            def block(i, total):
                rows = read_block(q_pos, b, bb, i, bq, 1)
                _, seen, x = masked(config, read_block(q, b, bb, i, bq, 3), k_, rows, kv_pos_, None, own.causal)
                x = x if bias_ is None else x + bias_[:, :, :, None]
                if own.before is not None:
                    seen &= kv_pos_[:, :, None] < sequences(own.before, b, bb)[:, None, None, None]
                x = jnp.where(seen[:, :, None], x, -jnp.inf)
                e, inverse_mass = _own(config, own, x, rows, kv_pos_, sequences(head, b, bb), nothing, b, i)
                theta = thresholds(spec, rows, seen.sum(-1), dtype)
                if not spec.count_self:
                    itself = rows[:, None, None, :, None] == kv_pos_[:, :, None, None, :]
                    e = jnp.where(itself, 0.0, e)
                f = _measure(spec, e, inverse_mass, _weight(config, spec, b, i, rows, dtype), theta)
                if spec.summed:
                    return add_prefix(total, f, b, bb)
                start = [jnp.int32(0)] * total.ndim
                start[0], start[-2] = jnp.int32(b * bb), jnp.int32((i - first // bq) * bq)
                return lax.dynamic_update_slice(total, f, start)

            return loop(lo, hi, block, total)

        total = loop(0, B // bb, each, total)
    if not spec.summed:
        total = total[..., first % bq : first % bq + num_rows - first, :]
    return spec.finish(total)


def _fused(config: Config, columns, q, k, v, q_pos, kv_pos, bias, nothing):
    B, K, G, T, _ = q.shape
    kind, dtype, q = q.dtype, accumulator(q.dtype), as_bits(q)
    bb, bq = config.together, config.block
    shape = lambda c: (B, K, G, config.num_slots) if c.per_query_head else (B, K, config.num_slots)
    lse = zeros_after((B, K, G, T), dtype, k)
    heads = [None if c.softmax is None else _heads(config, c.softmax, q) for c in columns]
    first = 0
    if config.tile is not None:
        whole = math.lcm(bq, config.tile.rows)
        tiled = config.first_block(columns) * bq // whole * whole
        first = tiled // bq
        q, lse = attend_tiles(config, tiled, kind, q, lse, k, v, q_pos, kv_pos, bias)
    carry = (q, lse, [zeros_after(shape(c), dtype, k) for c in columns])

    for lo, hi, active in config.segments(columns, first):
        width = config.prefix(hi)

        def each(b, carry, lo=lo, hi=hi, active=active, width=width):
            k_, v_, kv_pos_ = (sequences(x, b, bb)[:, :, :width] for x in (k, v, kv_pos))
            bias_ = first_keys(bias, b, bb, width)

            def block(i, carry):
                out, lse, sums = carry
                rows = read_block(q_pos, b, bb, i, bq, 1)
                x, seen, _ = masked(config, of_bits(read_block(out, b, bb, i, bq, 3), kind), k_, rows, kv_pos_, bias_)
                top = jnp.maximum(x.max(-1, keepdims=True), jnp.finfo(dtype).min)  # finite where a row sees nothing
                e = jnp.exp(x - top)
                mass = e.sum(-1)
                o = jnp.einsum("bkgrs,bksh->bkgrh", e.astype(v_.dtype), v_, preferred_element_type=dtype)
                o = (o * _inverse(mass, top, None, b, bb)[..., None]).astype(kind)
                inverse_mass = _inverse(mass, top, nothing, b, bb)
                sums = list(sums)
                for j in active:
                    spec = columns[j]
                    w = _weight(config, spec, b, i, rows, dtype)
                    theta = thresholds(spec, rows, seen.sum(-1), dtype)
                    found = e, inverse_mass
                    if spec.softmax is not None:
                        head = sequences(heads[j], b, bb)
                        found = _own(config, spec.softmax, x, rows, kv_pos_, head, nothing, b, i, (e, top))
                    sums[j] = add_prefix(sums[j], _measure(spec, *found, w, theta), b, bb)
                out = write_block(out, as_bits(o), b, bb, i, bq, 3)
                return out, write_block(lse, top[..., 0] + jnp.log(mass), b, bb, i, bq, 3), sums

            return loop(lo, hi, block, carry)

        carry = loop(0, B // bb, each, carry)
    out, lse, sums = carry
    return of_bits(out, kind), lse, tuple(c.finish(s) for c, s in zip(columns, sums, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(config: Config, structure, q, k, v, q_pos, kv_pos, bias, arrays):
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
    bb, bq, softcap, scale = config.together, config.block, config.logits.softcap, config.logits.factor(q.shape[-1])
    carry: Any = (q, *(None if x is None else jnp.zeros(x.shape, dtype) for x in (k, v, bias)))
    for lo, hi, _ in config.segments(()):
        width = config.prefix(hi)

        def each(b, carry, lo=lo, hi=hi, width=width):
            dq, dk, dv, dbias = carry
            k_, v_, kv_pos_ = (sequences(x, b, bb)[:, :, :width] for x in (k, v, kv_pos))
            bias_ = first_keys(bias, b, bb, width)

            def block(i, carry):
                dq, dk, dv, dbias = carry
                qi = read_block(dq, b, bb, i, bq, 3)
                x, _, capped = masked(config, qi, k_, read_block(q_pos, b, bb, i, bq, 1), kv_pos_, bias_)
                p = jnp.exp(x - read_block(finite_lse, b, bb, i, bq, 3)[..., None])
                do = read_block(d_out, b, bb, i, bq, 3)
                dv = dv + jnp.einsum("bkgrs,bkgrh->bksh", p, do)
                dp = jnp.einsum("bkgrh,bksh->bkgrs", do, v_.astype(dtype))
                dx = p * (dp - read_block(delta, b, bb, i, bq, 3)[..., None])
                dbias = None if dbias is None else dbias + dx.sum(3)
                if softcap is not None:
                    dx = dx * (1.0 - (capped / softcap) ** 2)
                dx = dx * jnp.asarray(scale, dtype)
                dk = dk + jnp.einsum("bkgrs,bkgrh->bksh", dx, qi.astype(dtype))
                dqi = jnp.einsum("bkgrs,bksh->bkgrh", dx, k_.astype(dtype)).astype(dq.dtype)
                return write_block(dq, dqi, b, bb, i, bq, 3), dk, dv, dbias

            start = (dq, *(None if x is None else jnp.zeros(x.shape, dtype) for x in (k_, v_, bias_)))
            dq, dk_, dv_, dbias_ = loop(lo, hi, block, start)
            dbias = None if dbias is None else add_prefix(dbias, dbias_, b, bb)
            return dq, add_prefix(dk, dk_, b, bb), add_prefix(dv, dv_, b, bb), dbias

        carry = loop(0, k.shape[0] // bb, each, carry)
    dq, dk, dv, dbias = carry
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None, dbias, None


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)
_compiled = jax.jit(_attention, static_argnums=(0, 1))  # called eagerly, its loops would be compiled at every call
