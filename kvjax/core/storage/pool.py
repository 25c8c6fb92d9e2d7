"""A layer's cache as one flat pool of slots, each owned by a kv head: budgets of heads may differ for free (Ada-KV)."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.core.contract import EMPTY, Reads
from kvjax.core.storage.layer import Keeps, Layer, dead_slots, in_order, where
from kvjax.pallas_kernels import pooled_attention
from kvjax.pallas_kernels.pytree import pytree, static


@pytree
class Pool:
    """One layer's pool. Head h owns the slots from `ends[h - 1]` up to `ends[h]`.

    Attributes:
      k, v: "B P H"; pos: "B P"; ends: "B K"; memory: arrays "B P ...", or of heads; log_weight: "B P", or None.
    """

    k: Any
    v: Any
    pos: Any
    ends: Any
    memory: Any = ()
    log_weight: Any = None
    how: Keeps = static(default=Keeps())
    channels = None

    @property
    def owner(self):
        """The head of every slot, live or dead: "B P"."""
        slot = jnp.arange(self.pos.shape[1])[None, :, None]
        return (slot >= self.ends[:, None, :-1]).sum(-1)

    def _mine(self):
        return self.owner[:, None] == jnp.arange(self.ends.shape[1])[None, :, None]

    @property
    def head_pos(self):
        """The positions that every head holds: "B K P"."""
        return jnp.where(self._mine(), self.pos[:, None], EMPTY)

    @property
    def room(self):
        """Dead slots of every head: "B K"."""
        return (self._mine() & (self.pos == EMPTY)[:, None]).sum(-1)

    nbytes = Layer.nbytes
    take = Layer.take
    where = where

    def replace(self, **fields) -> "Pool":
        """The same pool with other fields."""
        return dataclasses.replace(self, **fields)

    def view(self) -> Layer:
        """The layer as policies see it; keys and values are copied only where they are read."""
        mine = self._mine()
        copy = lambda x: jnp.broadcast_to(x[:, None], (len(x), mine.shape[1], *x.shape[1:]))
        spread = lambda x: jnp.where(mine.reshape(mine.shape + (1,) * (x.ndim - 2)), x[:, None], 0)
        weight = None if self.log_weight is None else spread(self.log_weight)
        return Layer(
            copy(self.k), copy(self.v), self.head_pos, self.how.of_slots(spread, self.memory), weight, how=self.how
        )

    def put(self, view: Layer) -> "Pool":
        """What a policy made of the view's positions and memory, and of what it writes."""
        written = {n: self._own(getattr(view, n)) for n in self.how.writes}
        return self.replace(pos=self._own(view.pos), memory=self.how.of_slots(self._own, view.memory), **written)

    def _own(self, x):
        index = self.owner[:, None]
        return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 3)), 1)[:, 0]

    def append(self, k, v, pos, *, grow: bool = False) -> "Pool":
        """See `Layer`: rows go into dead slots that their head owns."""
        if grow:
            raise ValueError("a pool does not grow; read the rest of the prompt before its last eviction")
        rows, P = pos.shape[1], self.pos.shape[1]
        at = dead_slots(self._mine() & (self.pos == EMPTY)[:, None], pos)
        at = (jnp.arange(len(k))[:, None, None], at) if rows > 1 else (jnp.arange(len(k))[:, None], at[..., 0])
        write = lambda x, new: x.at[at].set(jnp.asarray(new).astype(x.dtype), mode="drop", unique_indices=rows == 1)
        first = lambda x: x if rows > 1 else x[:, :, 0]
        blank = lambda x: write(x, 0)
        pos = write(self.pos, first(jnp.broadcast_to(pos[:, None], (*self.ends.shape, rows))))
        weight = None if self.log_weight is None else blank(self.log_weight)
        return self.replace(
            k=write(self.k, first(k)),
            v=write(self.v, first(v)),
            pos=pos,
            memory=self.how.of_slots(blank, self.memory),
            log_weight=weight,
        )

    def places(self, pos):
        """See `Layer`."""
        return pos[:, None]

    def keys(self, rotate):
        """See `Layer`."""
        return self.k

    def bias(self, group: int, slopes=None):
        """See `Layer`: "B G P"."""
        return (
            None
            if self.log_weight is None
            else jnp.broadcast_to(self.log_weight[:, None], (len(self.pos), group, self.pos.shape[1]))
        )

    def attend(self, q, pos, statistics=(), reads: Reads | None = None, *, rotate, slopes=None, **options):
        """See `Layer`; statistics are 0 in the slots of other heads."""
        reads, K = reads or Reads(), self.ends.shape[1]
        numbers = reads.visible is not None and reads.visible.dtype != bool
        if q.shape[2] > 1 or numbers or slopes is not None:
            return self.view().attend(q, pos, statistics, reads, rotate=rotate, slopes=slopes, **options)
        mine, read, bias = self._mine(), self.pos, self.bias(q.shape[1] // K)
        read = read if reads.visible is None else jnp.where((reads.visible & mine).any(1), read, EMPTY)
        read = read if reads.until is None else jnp.where(pos < self._own(reads.until), read, EMPTY)
        if reads.log_weight is not None:
            own = lambda x: self._own(jnp.broadcast_to(x, mine.shape))
            more = jnp.where(pos - self.pos >= own(reads.delay), own(reads.log_weight), 0.0)[:, None]
            bias = jnp.broadcast_to(more, (len(more), q.shape[1] // K, more.shape[2])) + (0.0 if bias is None else bias)
        how = {"num_kv_heads": K, "in_order": True, "bias": bias, **options}
        found = pooled_attention(q, self.k, self.v, self.owner, pos, read, statistics, **how)

        def spread(spec, x):
            x = jnp.where(mine.reshape(len(mine), K, *(1,) * (x.ndim - 2), -1), x[:, None], 0.0)
            return x.reshape(len(x), -1, *x.shape[3:]) if spec.group is None else x

        return dataclasses.replace(found, columns=tuple(map(spread, statistics, found.columns)))

    def compact(self, capacity: int, reserve=None):
        """See `Layer`."""
        return self.view().compact(capacity, reserve)


def to_pool(kv: Layer, capacity: int, most) -> Pool:
    """The live slots of all heads in one pool, with room for each to grow to `most` "B K" tokens if there is any."""
    if kv.channels is not None or kv.how.positions != "original":
        raise ValueError("a pool stores all key channels, at their original positions")
    (B, K, S), live = kv.pos.shape, kv.num_live
    free = capacity - live.sum(-1, keepdims=True)
    room = jnp.maximum(most - live, 0)
    room = jnp.where(room.sum(-1, keepdims=True) <= free, room, 0)
    rest = free - room.sum(-1, keepdims=True)
    room = room + rest // K + (jnp.arange(K)[None] < rest % K)
    ends = jnp.cumsum(live + room, -1)
    order = in_order(kv.pos)
    start = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
    place = jnp.where(jnp.arange(S) < live[..., None], start[..., None] + jnp.arange(S), capacity)
    slot = (jnp.arange(K)[None, :, None] * S + order).reshape(B, -1)
    source = jnp.full((B, capacity), K * S).at[jnp.arange(B)[:, None], place.reshape(B, -1)].set(slot, mode="drop")

    def move(x, fill=0):
        x = x.reshape(B, K * S, *x.shape[3:])
        index = source.reshape(source.shape + (1,) * (x.ndim - 2))
        return jnp.where(index < K * S, jnp.take_along_axis(x, jnp.minimum(index, K * S - 1), 1), fill).astype(x.dtype)

    weight = None if kv.log_weight is None else move(kv.log_weight)
    return Pool(
        move(kv.k),
        move(kv.v),
        move(kv.pos, EMPTY),
        ends.astype(jnp.int32),
        kv.how.of_slots(move, kv.memory),
        weight,
        kv.how,
    )
