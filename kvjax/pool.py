"""A layer's cache as one flat pool of slots, each owned by a kv head, so that budgets of heads may differ for free.

The dense layout gives every head of a layer the slots of its largest; the pool has as many slots as all heads together
need (Ada-KV, arXiv 2407.11550, keeps a flat buffer for the same reason). Policies see a pool as a `LayerKV` whose heads
share the slots (`view`): a slot is live for its owner and dead for all others.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree, Shaped

from kvjax.state import EMPTY, LayerKV, Positions, map_slots
from pallas_kernels.pytree import pytree, static


@pytree
class PooledKV:
    """One layer's cache in the pool layout.

    Attributes:
      k, v: keys and values.
      pos: absolute position of the token in the slot, or EMPTY.
      owner: the kv head that the slot belongs to; meaningless for a dead slot.
      memory, rank, rotated, positions: as in `LayerKV`, with one entry a slot of the pool.
      num_kv_heads: K.
    """

    k: Float[Array, "B P H"]
    v: Float[Array, "B P H"]
    pos: Int[Array, "B P"]
    owner: Int[Array, "B P"]
    memory: PyTree[Any] = ()
    rank: Int[Array, "B P"] | None = None
    rotated: Int[Array, "B P"] | None = None
    positions: Positions = static(default="original")
    num_kv_heads: int = static(default=1)

    @property
    def num_live(self) -> Int[Array, "B K"]:
        """Live slots of every kv head."""
        return (self.head_pos != EMPTY).sum(-1, dtype=jnp.int32)

    @property
    def num_slots(self) -> int:
        """Slots allocated for all heads together (static)."""
        return self.pos.shape[-1]

    @property
    def head_pos(self) -> Int[Array, "B K P"]:
        """The positions that every head holds, EMPTY elsewhere."""
        return self._spread(self.pos, EMPTY)

    def _spread(self, x: Shaped[Array, "B P *rest"], fill: Any) -> Shaped[Array, "B K P *rest"]:
        """One copy a head, `fill` in the slots of others."""
        heads = jnp.arange(self.num_kv_heads, dtype=jnp.int32)[None, :, None]
        mine = (self.owner[:, None] == heads) & (self.pos != EMPTY)[:, None]
        mine = mine.reshape(mine.shape + (1,) * (x.ndim - 2))
        return jnp.where(mine, x[:, None], jnp.asarray(fill, x.dtype))

    def view(self) -> LayerKV:
        """The layer as policies know it. Keys and values are copied for every head where they are read."""
        copy = lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], self.num_kv_heads, *x.shape[1:]))
        ranks = lambda x: None if x is None else self._spread(x, EMPTY)
        memory = map_slots(lambda m: self._spread(m, 0), self.memory)
        return LayerKV(
            copy(self.k),
            copy(self.v),
            self.head_pos,
            memory,
            ranks(self.rank),
            ranks(self.rotated),
            positions=self.positions,
        )

    def _own(self, x: Shaped[Array, "B K P *rest"]) -> Shaped[Array, "B P *rest"]:
        """Every slot's number for its owner. A chain of selects: gathers are slower on CPU."""
        found = x[:, 0]
        for head in range(1, self.num_kv_heads):
            mine = (self.owner == head).reshape(self.owner.shape + (1,) * (found.ndim - 2))
            found = jnp.where(mine, x[:, head], found)
        return found

    def apply(self, change: Callable[[LayerKV], LayerKV]) -> "PooledKV":
        """What a function of the view does to slots and memory; keys and values it cannot change."""
        view = self.view()
        after = change(view)
        if after is view:
            return self
        kept = lambda old, new, mine: mine if new is old else self._own(new)
        return dataclasses.replace(
            self,
            pos=kept(view.pos, after.pos, self.pos),
            memory=self.memory if after.memory is view.memory else map_slots(self._own, after.memory),
            rank=None if after.rank is None else kept(view.rank, after.rank, self.rank),
        )


@functools.partial(jax.jit, static_argnames="capacity")
def to_pool(kv: LayerKV, capacity: int) -> PooledKV:
    """Moves the live slots of all heads into one pool of `capacity` slots; the rest are dead.

    Slots lie head by head in the order they had. If the heads together hold more than `capacity` live tokens, the plan
    was made for other prompts: values become NaN instead of tokens being lost silently.
    """
    B, K, S, _ = kv.k.shape
    live = kv.live.reshape(B, K * S)
    place = jnp.where(live, jnp.cumsum(live, axis=-1, dtype=jnp.int32) - 1, capacity)
    batch = jnp.arange(B)[:, None]
    source = jnp.full((B, capacity), K * S, jnp.int32)
    slots = jnp.broadcast_to(jnp.arange(K * S, dtype=jnp.int32)[None], (B, K * S))
    source = source.at[batch, place].set(slots, mode="drop")
    filled = source < K * S

    def gather(x: Shaped[Array, "B K S *rest"], fill: Any = 0) -> Shaped[Array, "B P *rest"]:
        flat = x.reshape(B, K * S, *x.shape[3:])
        if K * S == 0:
            return jnp.full((B, capacity, *x.shape[3:]), fill, x.dtype)
        taken = flat.at[batch, jnp.minimum(source, K * S - 1)].get()
        return jnp.where(filled.reshape(filled.shape + (1,) * (taken.ndim - 2)), taken, jnp.asarray(fill, x.dtype))

    overflow = (kv.num_live.sum(-1) > capacity)[:, None, None]
    return PooledKV(
        gather(kv.k),
        jnp.where(overflow, jnp.asarray(jnp.nan, kv.v.dtype), gather(kv.v)),
        gather(kv.pos, EMPTY),
        gather(jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32)[None, :, None], kv.pos.shape)),
        map_slots(gather, kv.memory),
        None if kv.rank is None else gather(kv.rank, EMPTY),
        None if kv.rotated is None else gather(kv.rotated, EMPTY),
        kv.positions,
        K,
    )


def insert_pooled(
    kv: PooledKV,
    k: Float[Array, "B K 1 H"],
    v: Float[Array, "B K 1 H"],
    pos: Int[Array, "B 1"],
    rank: Int[Array, "B K"] | None,
) -> PooledKV:
    """Writes one token of every head into the first dead slots of the pool, in place under `jit`.

    A token whose position is EMPTY changes nothing that is live. Where the pool is full, it has been driven past its
    plan, and values become NaN.
    """
    B, K, _, _ = k.shape
    index = lax.broadcasted_iota(jnp.int32, kv.pos.shape, 1)
    places, dead = [], kv.pos == EMPTY
    for _ in range(K):  # K reductions are cheaper than one sort
        first = jnp.where(dead, index, kv.num_slots).min(-1, keepdims=True)
        places.append(first)
        dead = dead & (index != first)
    place = jnp.concatenate(places, axis=-1)  # "B K"; num_slots where there is none
    overflow = ((place == kv.num_slots).any(-1) & (pos[:, 0] != EMPTY))[:, None]
    batch = jnp.arange(B)[:, None]
    write = lambda x, new: x.at[batch, place].set(new.astype(x.dtype), mode="drop", unique_indices=True)
    spoiled = jnp.where(overflow, 0, kv.num_slots)
    heads = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32)[None], (B, K))
    blank = lambda m: write(m, jnp.zeros((B, K, *m.shape[2:]), m.dtype))
    return dataclasses.replace(
        kv,
        k=write(kv.k, k[:, :, 0]),
        v=write(kv.v.at[batch, spoiled].set(jnp.nan, mode="drop"), v[:, :, 0]),
        pos=write(kv.pos, jnp.broadcast_to(pos, (B, K))),
        owner=write(kv.owner, heads),
        memory=map_slots(blank, kv.memory),
        rank=None if kv.rank is None or rank is None else write(kv.rank, rank),
        rotated=None if kv.rotated is None or rank is None else write(kv.rotated, rank),
    )
