"""Where queries meet the cache: store the new tokens, attend, measure. Called once a layer by the models."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import mesh
from kvjax.cache.context import Context
from kvjax.cache.pool import PooledKV
from kvjax.cache.state import LayerKV, Rotate, Slopes, append, linear_bias, widened
from kvjax.pallas_kernels import attention
from kvjax.pallas_kernels.columns import accumulator
from kvjax.policy import LayerPolicy
from kvjax.scoring.stats import LayerStats, Measurement, Moment


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
        hidden: Float[Array, "B T D"] | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        slopes: Slopes | None = None,
    ) -> tuple[Float[Array, "B N T H"], LayerKV | None, LayerStats]:
        """Attention output, the layer's cache after the step, and what was measured.

        Args:
          cache: the layer's cache, None for plain causal attention without one.
          q, k: queries and keys before rotation.
          v: values.
          layer: index of the layer.
          rotate: applies the rotary embedding at given positions.
          out_proj: the layer's output projection, for policies that look at what values contribute.
          hidden: what queries, keys and values are projections of, for policies that look at hidden states.
          scale, window, softcap: as in `kvjax.pallas_kernels.attention`.
          slopes: those of ALiBi, one for each query head, for models that tell keys' positions by them.
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
    hidden: Float[Array, "B T D"] | None = None,
    policy: LayerPolicy | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    slopes: Slopes | None = None,
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
      hidden: what queries, keys and values are projections of, for measurements that need it.
      policy: the layer's, which may hide live slots from a single new row.
      scale, window, softcap: as in `kvjax.pallas_kernels.attention`.
      slopes: of ALiBi, one for each query head: the logit of a key falls by it with every place between the key and
        the row. Places are what keys are rotated at in models that rotate them: original positions, or the ranks of
        live keys, those of now ("compact") or of the last eviction ("rerotate"), which are the same here.

    Returns:
      The attention output, the cache with the new tokens, and the measurements over its slots.

    Raises:
      ValueError: another number of slopes than query heads.
    """
    _check_slopes(slopes, q.shape[1])
    kv = kv.view() if ctx.phase == "prefill" else kv
    rotate = _in_prompt(rotate, ctx)
    K, raw_q = kv.num_kv_heads, q
    if k.shape[1] != K:  # a set of slots for every query head
        k, v = (jnp.repeat(x, K // k.shape[1], axis=1) for x in (k, v))
    place, lag, first = None if kv.positions == "original" else kv.next_ranks(pos), None, 0
    if place is not None and isinstance(kv, LayerKV) and kv.positions == "sliding" and ctx.phase == "decode":
        first = 0 if policy is None else policy.spec.first or 0
        kv, lag = mesh.by_head(lambda kv: kv.settled(rotate, first), kv)
        place = place - lag
    of_heads = lambda place: jnp.repeat(place, q.shape[1] // K, axis=1)
    q = rotate(q, pos[:, None] if place is None else of_heads(place))
    if kv.positions != "compact":
        k = rotate(k, pos[:, None] if place is None else place)
    if (channels := kv.channels) is not None:  # keys have lost channels: queries need no others
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k = (_thinned(x, channels) for x in (q, k))
    if isinstance(kv, LayerKV) and lag is not None:
        kv = kv.insert(k, v, pos, lag)
    else:
        kv = kv.turned(rotate)
        kv = append(kv.view(), k, v, pos) if ctx.phase == "prefill" else kv.insert(k, v, pos)
    if policy is not None and ctx.phase == "decode":
        kv = kv.apply(lambda view: policy.appended(view, ctx))
    keys, view = kv.keys(rotate), kv.view()
    q = widened(q, keys.shape[-1])

    moment = Moment(q, raw_q, view, pos, ctx, rotate, out_proj, hidden, scale, window, softcap, slopes)
    requests = {o: o.columns(moment) for o in observe}
    columns = {o: c for o, c in requests.items() if c is not None}
    bias = None if slopes is None else kv.bias(slopes)
    if place is not None and lag is not None and q is not raw_q and first:  # not for models that rotate nothing
        ahead = rotate(raw_q, of_heads(place + lag))
        last = first, q.shape[-1] ** -0.5 if scale is None else scale, softcap
        nearer = mesh.by_head(lambda own: _nearer(own[0], own[1], own[2], *last), (view, q, ahead))
        bias = nearer if bias is None else bias + nearer
    if kv.gate is not None:  # a slot is read with its gate as weight
        tiny = float(jnp.finfo(jnp.float32).tiny)  # finite logits, as infinite ones have no gradient
        weight = jnp.repeat(jnp.log(jnp.maximum(kv.gate, tiny)), q.shape[1] // K, axis=1)
        bias = weight if bias is None else weight.astype(bias.dtype) + bias
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias}
    visible = None if policy is None else policy.visible(moment)
    apart = policy is not None and visible is not None and policy.spec.hides == "live"
    result = kv.attend(q, keys, pos, () if apart else tuple(columns.values()), visible=visible, **options)
    found = kv.attend(q, keys, pos, tuple(columns.values()), **options) if apart else result
    measured = dict(zip(columns, found.columns, strict=True))
    moment = dataclasses.replace(moment, measured=measured)
    values = tuple(measured[o] if o in measured else o.measure(moment) for o in observe)
    return result.out, kv, LayerStats(values, tuple(observe))


def _in_prompt(rotate: Rotate, ctx: Context) -> Rotate:
    """The rotation of the whole prompt, of which these tokens may be a block; behind it, that of what was read."""
    of_text = getattr(rotate, "of_text", None)
    return rotate if of_text is None else of_text(jnp.where(ctx.length > ctx.prompt_length, 0, ctx.prompt_length))


def _nearer(
    kv: LayerKV,
    q: Float[Array, "B N 1 H"],
    ahead: Float[Array, "B N 1 H"],
    first: int,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B N S"]:
    """What logits of the first tokens, which have not moved, have beyond their products with `q`.

    Args:
      kv: the layer.
      q: queries turned back as far as the keys of all others lag behind.
      ahead: queries at their own rank.
      first: how many these tokens are.
      scale, softcap: as in `kvjax.pallas_kernels.attention`.
    """
    (B, K, S), (N, H), dtype = kv.pos.shape, (q.shape[1], q.shape[3]), accumulator(q.dtype)
    b, h, slots = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], kv.first_slots(first)
    keys = kv.k.at[b, h, slots].get(mode="fill", fill_value=0)
    rows = jnp.stack([x.reshape(B, K, N // K, H) for x in (q, ahead)])
    x = jnp.einsum("xbkgh,bkfh->xbkfg", rows, keys, preferred_element_type=dtype) * jnp.asarray(scale, dtype)
    x = x if softcap is None else softcap * jnp.tanh(x / softcap)
    beyond = jnp.zeros((B, K, S, N // K), dtype).at[b, h, slots].set(x[1] - x[0], mode="drop", unique_indices=True)
    return beyond.swapaxes(2, 3).reshape(B, N, S)


def _check_slopes(slopes: Slopes | None, num_query_heads: int) -> None:
    if slopes is not None and len(slopes) != num_query_heads:
        raise ValueError(f"{len(slopes)} slopes for {num_query_heads} query heads; give one for each")


def _thinned(x: Float[Array, "B N T H"], channels: Int[Array, "B K C"]) -> Float[Array, "B N T C"]:
    """The channels of queries or keys that their kv head has left."""
    index = jnp.repeat(channels[:, :, None], x.shape[1] // channels.shape[1], axis=1)
    return jnp.take_along_axis(x, index, axis=-1)


def without_cache(pos: Int[Array, "B T"]) -> Attend:
    """Plain causal attention among T tokens, for training and for scoring text without a cache. Differentiable."""

    def plain(
        cache, q, k, v, *, layer, rotate, out_proj=None, hidden=None, scale=None, window=None, softcap=None, slopes=None
    ):
        del layer, out_proj, hidden
        _check_slopes(slopes, q.shape[1])
        B, K, T, _ = k.shape
        keys_pos = jnp.broadcast_to(pos[:, None], (B, K, T))
        q, k = rotate(q, pos[:, None]), rotate(k, pos[:, None])
        bias = None if slopes is None else linear_bias(slopes, keys_pos, dtype=k.dtype)
        result = attention(q, k, v, pos, keys_pos, bias=bias, scale=scale, window=window, softcap=softcap)
        return result.out, cache, LayerStats()

    return plain
