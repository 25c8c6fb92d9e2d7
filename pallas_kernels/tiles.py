"""Attention by an online softmax over tiles, where no statistic reads a row (`kvjax.pallas_kernels.xla`)."""

import dataclasses
import functools
import math
import os

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.pallas_kernels.columns import accumulator
from kvjax.pallas_kernels.loops import (
    Config,
    Tile,
    as_bits,
    first_keys,
    loop,
    of_bits,
    products,
    read_block,
    sequences,
    write_block,
)

TILE_ROWS, TILE_KEYS = 1024, 256  # rows of all query heads, and keys: a MiB of logits, which stays in a core's cache
MAX_ROWS = 256  # of one query head
LEAST_ROWS = 512  # of fewer, whole rows stay in cache as well


def tile_size(group: int, num_rows: int, num_slots: int, cores: int | None = None) -> Tile | None:
    """The tiles of a call, None where whole rows are as fast.

    That is for few rows, and on a GPU, whose own kernels leave little to XLA: loops over tiles that fit a core's cache
    would launch thousands of small programs there. Several cores share every operation of a tile and wait for each
    other after it, so their tiles are four times as large; but rows that fill no tile take a slower way, and the
    smaller tiles stay where the larger ones would leave more of them.

    Args:
      group: query heads of a kv head.
      num_rows: rows of a query head that no statistic reads.
      num_slots: slots of a set, which is one kv head of a sequence.
      cores: those that XLA uses; `num_cores` if None.
    """
    if num_rows < LEAST_ROWS or num_slots < 2 * TILE_KEYS or jax.default_backend() == "gpu":
        return None
    rows = MAX_ROWS
    while rows > 32 and rows * group > TILE_ROWS:
        rows //= 2
    cores = num_cores() if cores is None else cores
    if cores > 1 and num_slots >= 4 * TILE_KEYS and num_rows % (2 * rows) < rows:
        return Tile(2 * rows, 2 * TILE_KEYS, 1)
    return Tile(rows, TILE_KEYS, 1)


def num_cores() -> int:
    """How many cores XLA uses: as many as NPROC says, or those that this process may run on."""
    if os.environ.get("NPROC", "").isdecimal():
        return int(os.environ["NPROC"])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def attend_tiles(config: Config, stop: int, kind, q, lse, k, v, q_pos, kv_pos, bias):
    """Output and logsumexp of the rows before `stop`, a multiple of a tile's rows.

    The output is written over the queries, both `as_bits` of the dtype `kind`.

    Positions decide, as everywhere. A tile is masked unless every row of it sees every key. Which keys a tile of rows
    visits follows from what is known of any call: row `i` sees no slot after `offset + i`. Under a window, keys before
    the first tile that holds a position in reach are skipped, wherever it stands.
    """
    tile, logits = config.tile, config.logits
    if tile is None or not stop:
        return q, lse
    bb, R, W, S = tile.together, tile.rows, min(tile.keys, config.num_slots), config.num_slots
    dtype = accumulator(kind)
    G, H = q.shape[2], q.shape[-1]
    num_tiles = -(-S // W)
    latest = jnp.iinfo(q_pos.dtype).max

    def sets(b, carry):
        k_, v_, kv_pos_ = (sequences(x, b, bb) for x in (k, v, kv_pos))
        bias_ = first_keys(bias, b, bb, S)
        tiled = lambda pos, fill: jnp.pad(pos, ((0, 0), (0, 0), (0, num_tiles * W - S)), constant_values=fill)
        newest = tiled(kv_pos_, -1).reshape(bb, num_tiles, W).max(-1)
        oldest = tiled(kv_pos_, latest).reshape(bb, num_tiles, W).min(-1)

        def rows(i, carry):
            out, lse = carry
            here = read_block(q_pos, b, bb, i, R, 1)
            first, last = jnp.where(here >= 0, here, latest).min(), here.max()
            qi, scaled = of_bits(read_block(out, b, bb, i, R, 3), kind), logits
            if kind == dtype or math.frexp(logits.factor(H))[0] == 0.5:  # a product a query, where that is exact
                qi, scaled = qi * jnp.asarray(logits.factor(H), kind), dataclasses.replace(logits, scale=1.0)

            def keys(j, state):
                start = jnp.minimum(j * W, S - W)
                cut = lambda x, axis: lax.dynamic_slice_in_dim(x, start, W, axis)

                def update(masked, pos, top, mass, o):
                    x = products(scaled, qi, cut(k_, 2))
                    if bias_ is not None:
                        x = x + cut(bias_, 3)[:, :, :, None]
                    if masked:
                        x = jnp.where(logits.visible(here, pos)[:, :, None], x, -jnp.inf)
                    higher = jnp.maximum(top, x.max(-1))
                    e = jnp.exp(x - higher[..., None])
                    shrink = jnp.exp(top - higher)
                    new = jnp.einsum("bkgrs,bksh->bkgrh", e.astype(v.dtype), cut(v_, 2), preferred_element_type=dtype)
                    return higher, mass * shrink + e.sum(-1), o * shrink[..., None] + new

                pos = jnp.where(start + jnp.arange(W) >= j * W, cut(kv_pos_, 2), -1)  # the last tile reads none twice
                all_seen = (oldest[:, j] >= 0) & (newest[:, j] <= here.min()) & (start == j * W)
                if logits.window is not None:
                    all_seen &= last - oldest[:, j] < logits.window
                see = functools.partial(update, False), functools.partial(update, True)
                return lax.cond(all_seen.all(), *see, pos, *state)

            begin = jnp.int32(0)
            if logits.window is not None:
                begin = jnp.argmax((newest > first - logits.window).any(0)).astype(jnp.int32)
            end = (jnp.minimum(S, config.offset + (i + 1) * R) + W - 1) // W
            shape = (bb, q.shape[1], G, R)
            start = jnp.full(shape, jnp.finfo(dtype).min), jnp.zeros(shape, dtype), jnp.zeros((*shape, H), dtype)
            top, mass, o = lax.fori_loop(begin, end, keys, start)  # `top` is finite where a row sees nothing
            o = (o / jnp.where(mass > 0, mass, 1.0)[..., None]).astype(kind)
            return write_block(out, as_bits(o), b, bb, i, R, 3), write_block(lse, top + jnp.log(mass), b, bb, i, R, 3)

        return loop(0, stop // R, rows, carry)

    return loop(0, q.shape[0] // bb, sets, (q, lse))
