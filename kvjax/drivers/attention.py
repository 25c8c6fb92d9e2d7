"""Where queries meet the cache: store the new tokens, attend, measure. Called once a layer by the models."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.cache.context import Context
from kvjax.cache.pool import PooledKV, insert_pooled
from kvjax.cache.state import EMPTY, LayerKV, append, insert, next_ranks
from kvjax.policy import LayerPolicy
from kvjax.scoring.stats import LayerStats, Measurement, Moment, Rotate
from pallas_kernels import Columns, attention, pooled_attention


@runtime_checkable
class Attend(Protocol):
    """What a model calls in each layer, instead of owning a cache: `(q, k, v) -> out`, cache threaded through."""

    def __call__(
        self,
        cache: LayerKV | None,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T H"],
        *,
        layer: int,
        rotate: Rotate,
        out_proj: Float[Array, "N H D"] | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> tuple[Float[Array, "B N T H"], LayerKV | None, LayerStats]:
        """Attention output, the layer's cache after the step, and what was measured.

        Args:
          cache: the layer's cache, None for plain causal attention without one.
          q, k: queries and keys before rotation.
          v: values.
          layer: index of the layer.
          rotate: applies the rotary embedding at given positions.
          out_proj: the layer's output projection, for policies that look at what values contribute.
          scale, window, softcap: as in `pallas_kernels.attention`.
        """
        ...


def attend(
    kv: LayerKV | PooledKV,
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    pos: Int[Array, "B T"],
    *,
    ctx: Context,
    rotate: Rotate,
    observe: Sequence[Measurement] = (),
    out_proj: Float[Array, "N H D"] | None = None,
    policy: LayerPolicy | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "B N T H"], Any, LayerStats]:
    """Appends T tokens to a layer's cache and attends with them.

    Args:
      kv: the cache before.
      q, k: queries and keys before rotation.
      v: values.
      pos: absolute positions of the new tokens, EMPTY for padding.
      ctx: the moment after these tokens; "prefill" appends slots, "decode" writes the one token into a dead slot.
      rotate: applies the rotary embedding at given positions.
      observe: what to measure.
      out_proj: the layer's output projection, for measurements that need it.
      policy: the layer's, which may hide live slots from a single new row.
      scale, window, softcap: as in `pallas_kernels.attention`.

    Returns:
      The attention output, the cache with the new tokens, and the measurements over its slots.
    """
    if isinstance(kv, PooledKV):
        if ctx.phase == "decode":
            options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
            return _attend_pooled(kv, q, k, v, pos, ctx, rotate, observe, out_proj, policy, options)
        kv = kv.view()
    store = insert if ctx.phase == "decode" else append
    raw_q = q
    if kv.k.shape[1] != k.shape[1]:  # a set of slots for every query head
        k, v = (jnp.repeat(x, kv.k.shape[1] // k.shape[1], axis=1) for x in (k, v))
    if kv.positions == "original":
        q, k = rotate(q, pos[:, None]), rotate(k, pos[:, None])
        if kv.channels is not None:  # keys have lost channels: queries need no others
            B, N, T, _ = q.shape
            index = kv.channels[:, :, None]
            k = jnp.take_along_axis(k, index, axis=-1)
            index = jnp.repeat(index, N // kv.channels.shape[1], axis=1)
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            q = jnp.take_along_axis(q, index, axis=-1)
        kv = store(kv, k, v, pos)
        # Attention wants queries, keys and values of one width; what was dropped comes back as zeros for this step.
        widen = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, v.shape[-1] - x.shape[-1])))
        q, keys = (q, kv.k) if kv.channels is None else (widen(q), widen(kv.k))
    else:
        B, K, T, _ = k.shape
        rank = next_ranks(kv, jnp.broadcast_to(pos[:, None], (B, K, T)))
        q = rotate(q, jnp.repeat(rank, q.shape[1] // K, axis=1))
        if kv.positions == "rerotate":
            kv = store(_rerotate(kv, rotate), rotate(k, rank), v, pos)
            keys = kv.k
        else:
            kv = store(kv, k, v, pos)
            keys = rotate(kv.k, jnp.zeros_like(kv.pos) if kv.rank is None else jnp.maximum(kv.rank, 0))
    moment = Moment(q, raw_q, kv, pos, ctx, rotate, out_proj, scale, window, softcap)
    requests = {o: o.columns(moment) for o in observe}
    columns = {o: c for o, c in requests.items() if c is not None}
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    visible = None if policy is None else policy.visible(kv, ctx)
    read = kv.pos if visible is None else jnp.where(visible, kv.pos, EMPTY)
    apart = policy is not None and visible is not None and policy.spec.hides == "live"
    if kv.gate is not None:  # a slot is read with its gate as weight
        tiny = float(jnp.finfo(jnp.float32).tiny)  # finite logits, as infinite ones have no gradient
        options["bias"] = jnp.repeat(jnp.log(jnp.maximum(kv.gate, tiny)), q.shape[1] // kv.gate.shape[1], axis=1)
    result = attention(q, keys, kv.v, pos, read, columns=() if apart else tuple(columns.values()), **options)
    measured = result.columns
    if apart:
        measured = attention(q, keys, kv.v, pos, kv.pos, columns=tuple(columns.values()), **options).columns
    measured = dict(zip(columns, measured, strict=True))
    moment = dataclasses.replace(moment, measured=measured)
    found = tuple(measured[o] if o in measured else o.measure(moment) for o in observe)
    return result.out, kv, LayerStats(found, tuple(observe))


def _attend_pooled(kv: PooledKV, q, k, v, pos, ctx, rotate, observe, out_proj, policy, options):
    """`attend` for one token of every sequence over a pool."""
    K = kv.num_kv_heads
    raw_q = q
    if k.shape[1] != K:  # a set of slots for every query head
        k, v = (jnp.repeat(x, K // k.shape[1], axis=1) for x in (k, v))
    if kv.rank is None:
        kv = insert_pooled(kv, rotate(k, pos[:, None]), v, pos, None)
        q, keys = rotate(q, pos[:, None]), kv.k
    else:
        rank = jnp.where(pos == EMPTY, EMPTY, kv.num_live)  # "B K"
        q = rotate(q, jnp.repeat(rank, q.shape[1] // K, axis=1)[..., None])
        if kv.rotated is not None:
            moved = jnp.where(kv.pos == EMPTY, 0, kv.rank - kv.rotated)
            turned = lambda kv=kv, moved=moved: rotate(kv.k[:, None], moved[:, None])[:, 0].astype(kv.k.dtype)
            stored = lax.cond((moved != 0).any(), turned, lambda kv=kv: kv.k)
            kv = dataclasses.replace(kv, k=stored, rotated=kv.rank)
            kv = insert_pooled(kv, rotate(k, rank[..., None]), v, pos, rank)
            keys = kv.k
        else:
            kv = insert_pooled(kv, k, v, pos, rank)
            keys = rotate(
                kv.k[:, None], jnp.zeros_like(kv.pos)[:, None] if kv.rank is None else jnp.maximum(kv.rank, 0)[:, None]
            )[:, 0]
    view = kv.view()
    moment = Moment(q, raw_q, view, pos, ctx, rotate, out_proj, **options)
    requests = {o: o.columns(moment) for o in observe}
    columns = {o: c for o, c in requests.items() if c is not None}
    visible = None if policy is None else policy.visible(view, ctx)
    read = kv.pos if visible is None else jnp.where(visible.any(1), kv.pos, EMPTY)
    apart = policy is not None and visible is not None and policy.spec.hides == "live"
    over = lambda pos_, wanted: pooled_attention(
        q, keys, kv.v, kv.owner, pos, pos_, tuple(wanted), num_kv_heads=K, in_order=True, **options
    )
    result = over(read, () if apart else columns.values())
    measured = over(kv.pos, columns.values()).columns if apart else result.columns
    measured = {o: _by_head(kv, c, x) for (o, c), x in zip(columns.items(), measured, strict=True)}
    values = tuple(measured[o] if o in measured else o.measure(moment) for o in observe)
    return result.out, kv, LayerStats(values, tuple(observe))


def _by_head(kv: PooledKV, spec: Columns, x: Float[Array, "B *head P"]) -> Float[Array, "B _ *row P"]:
    """A pool's statistic as policies know it: one number a head and slot, 0 in the slots of other heads."""
    K = kv.num_kv_heads
    mine = kv.owner[:, None] == jnp.arange(K, dtype=jnp.int32)[None, :, None]
    x = jnp.where(mine.reshape(x.shape[0], K, *(1,) * (x.ndim - 2), -1), x[:, None], 0.0)
    return x.reshape(x.shape[0], -1, *x.shape[3:]) if spec.group is None else x


def _rerotate(kv: LayerKV, rotate: Rotate) -> LayerKV:
    """Keys rotated at their present ranks: those that moved up since they were stored are turned by the difference."""
    if kv.rank is None or kv.rotated is None or not kv.num_slots:
        return kv
    moved = jnp.where(kv.live, kv.rank - kv.rotated, 0)
    k = lax.cond((moved != 0).any(), lambda: rotate(kv.k, moved).astype(kv.k.dtype), lambda: kv.k)
    return dataclasses.replace(kv, k=k, rotated=kv.rank)


def without_cache(pos: Int[Array, "B T"]) -> Attend:
    """Plain causal attention among T tokens, for training and for scoring text without a cache. Differentiable."""

    def plain(cache, q, k, v, *, layer, rotate, out_proj=None, scale=None, window=None, softcap=None):
        del layer, out_proj
        B, K, T, _ = k.shape
        keys_pos = jnp.broadcast_to(pos[:, None], (B, K, T))
        q, k = rotate(q, pos[:, None]), rotate(k, pos[:, None])
        result = attention(q, k, v, pos, keys_pos, scale=scale, window=window, softcap=softcap)
        return result.out, cache, LayerStats()

    return plain
