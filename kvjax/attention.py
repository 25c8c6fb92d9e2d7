"""Where queries meet the cache: store the new tokens, attend, measure. Called once a layer by the models."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.context import Phase
from kvjax.state import LayerKV, append, insert, next_ranks
from kvjax.stats import LayerStats, Observe
from pallas_kernels import attention

Rotate = Callable[[Float[Array, "B N T H"], Int[Array, "B #N T"]], Float[Array, "B N T H"]]


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
          scale, window, softcap: as in `pallas_kernels.attention`.
        """
        ...


def attend(
    kv: LayerKV,
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    pos: Int[Array, "B T"],
    *,
    phase: Phase,
    rotate: Rotate,
    observe: Sequence[Observe] = (),
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "B N T H"], LayerKV, LayerStats]:
    """Appends T tokens to a layer's cache and attends with them.

    Args:
      kv: the cache before.
      q, k: queries and keys before rotation.
      v: values.
      pos: absolute positions of the new tokens, EMPTY for padding.
      phase: "prefill" appends slots, "decode" writes the one token into a dead slot.
      rotate: applies the rotary embedding at given positions.
      observe: what to measure.
      scale, window, softcap: as in `pallas_kernels.attention`.

    Returns:
      The attention output, the cache with the new tokens, and the measurements over its slots.
    """
    store = insert if phase == "decode" else append
    if kv.positions == "original":
        kv = store(kv, rotate(k, pos[:, None]), v, pos)
        q, keys = rotate(q, pos[:, None]), kv.k
    else:
        B, K, T, _ = k.shape
        rank = next_ranks(kv, jnp.broadcast_to(pos[:, None], (B, K, T)))
        kv = store(kv, k, v, pos)
        q = rotate(q, jnp.repeat(rank, q.shape[1] // K, axis=1))
        keys = rotate(kv.k, jnp.zeros_like(kv.pos) if kv.rank is None else jnp.maximum(kv.rank, 0))
    columns = [o.columns(q.shape[2]) for o in observe]
    result = attention(q, keys, kv.v, pos, kv.pos, columns=columns, scale=scale, window=window, softcap=softcap)
    return result.out, kv, LayerStats(result.columns, tuple(observe))


def without_cache(pos: Int[Array, "B T"]) -> Attend:
    """Plain causal attention among T tokens, for training and for scoring text without a cache. Differentiable."""

    def plain(cache, q, k, v, *, layer, rotate, scale=None, window=None, softcap=None):
        del layer
        B, K, T, _ = k.shape
        keys_pos = jnp.broadcast_to(pos[:, None], (B, K, T))
        q, k = rotate(q, pos[:, None]), rotate(k, pos[:, None])
        result = attention(q, k, v, pos, keys_pos, scale=scale, window=window, softcap=softcap)
        return result.out, cache, LayerStats()

    return plain
