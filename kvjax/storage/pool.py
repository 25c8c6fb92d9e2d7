"""A layer's cache as one pool of slots, each owned by a kv head: heads may have different budgets (Ada-KV)."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from kvjax.contract import EMPTY, LAST, LayerView, Reads, Rotate
from kvjax.pallas_kernels import pooled_attention
from kvjax.pallas_kernels.columns import Attention, Columns
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.storage.codes import Codes, Rows, coded, each_part, mean_of, moved, rows_of
from kvjax.storage.layer import Layer, dead_slots, filled, in_order, of_row
from kvjax.storage.mesh import DATA, apart
from kvjax.storage.protocol import Keeps, Readers, Storage


@pytree
class Pool(Storage):
    """One layer's pool of P slots. Head h owns the slots from `ends[h - 1]` up to `ends[h]`.

    Attributes:
      k, v: keys, rotated to `pos` or, where positions are ranks, not at all; and values.
      pos: the position in the text of each slot's token, `EMPTY` for a dead slot.
      ends: where the slots of each head end.
      memory: what the policy remembers: arrays "B P ...", or "B K ..." where they belong to heads.
      log_weight: the logarithm of what each slot counts in attention, None for one each.
      how: what is static.
    """

    k: Rows
    v: Rows
    pos: Int[Array, "B P"]
    ends: Int[Array, "B K"]
    memory: PyTree = ()
    log_weight: Float[Array, "B P"] | None = None
    how: Keeps = static(default=Keeps())

    axes = (DATA,)
    channels = None  # a pool stores all

    @property
    def owner(self) -> Int[Array, "B P"]:
        """The head that owns each slot, live or dead."""
        slot = jnp.arange(self.pos.shape[1])[None, :, None]
        return (slot >= self.ends[:, None, :-1]).sum(-1)

    @property
    def values(self) -> Float[Array, "B P V"]:
        return super().values if self.how.latent else rows_of(self.v, self.owner)

    def _mine(self) -> Bool[Array, "B K P"]:
        """Which slots each head owns."""
        return self.owner[:, None] == jnp.arange(self.ends.shape[1])[None, :, None]

    @property
    def head_pos(self) -> Int[Array, "B K P"]:
        return jnp.where(self._mine(), self.pos[:, None], EMPTY)

    @property
    def num_live(self) -> Int[Array, "B K"]:
        return (self.head_pos != EMPTY).sum(-1, dtype=jnp.int32)

    def view(self) -> Layer:
        """The layer with P slots in each head; keys and values are copied only if they are read."""
        mine = self._mine()
        copy = lambda x: jnp.broadcast_to(x[:, None], (len(x), mine.shape[1], *x.shape[1:]))
        zero = lambda x: jnp.zeros((), x.dtype)
        spread = lambda x: jnp.where(mine.reshape(mine.shape + (1,) * (x.ndim - 2)), x[:, None], zero(x))
        weight = None if self.log_weight is None else spread(self.log_weight)
        k, v = (each_part(copy, x) for x in (self.k, self.v))
        memory = self.how.of_slots(spread, self.memory)
        return Layer(k, v, self.head_pos, self.fault, memory, weight, how=self.how)

    def _put(self, view: LayerView, changed: dict[str, Array]) -> "Pool":
        written: dict[str, Any] = {n: self._own(x) for n, x in changed.items()}
        for n in ("k", "v"):
            if n in written and isinstance(codes := getattr(self, n), Codes):
                written[n] = codes.changed(codes.rows(self.owner), written[n], self.owner)
        memory = self.how.of_slots(self._own, view.memory)
        return self.replace(pos=self._own(view.pos), fault=view.fault, memory=memory, **written)

    def _own(self, x: Shaped[Array, "B K P *rest"]) -> Shaped[Array, "B P *rest"]:
        """Each slot's entry for the head that owns it, of an array with all slots in every head."""
        index = self.owner[:, None]
        return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 3)), 1)[:, 0]

    def free(self, pos: Int[Array, "B T"]) -> Int[Array, "B K T"]:
        other = lambda pool: jnp.where(pool._mine(), pool.pos[:, None], LAST)  # slots of other heads are not free
        return apart(self.how.mesh, lambda pool, pos: dead_slots(other(pool), pos), self, pos, axes=self.axes)

    def append(
        self,
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T V"],
        pos: Int[Array, "B T"],
        slots: Int[Array, "B K T"] | None = None,
    ) -> "Pool":
        """Stores new rows in dead slots that their heads own.

        Raises:
          ValueError: no `slots`, since a pool has the slots that it has.
        """
        if slots is None:
            raise ValueError("a pool does not grow; read the rest of the prompt before its last eviction")
        each = jnp.broadcast_to(pos[:, None], k.shape[:3])
        return apart(self.how.mesh, filled, self, k, v, each, slots, axes=self.axes)

    def keys(self, rotate: Rotate) -> Float[Array, "B P H"]:
        """Keys, rotated for the queries."""
        k = rows_of(self.k, self.owner)
        if self.how.positions != "rank":
            return k
        owner, start = self.owner, jnp.pad(self.ends[:, :-1], ((0, 0), (1, 0)))
        order = jnp.lexsort((jnp.where(self.pos == EMPTY, LAST, self.pos), owner), axis=-1)  # heads stay in their slots
        rank = jnp.argsort(order, axis=-1) - jnp.take_along_axis(start, owner, axis=1)
        turned = rotate(k[:, None], jnp.where(self.pos == EMPTY, 0, rank)[:, None])
        return turned[:, 0].astype(k.dtype)

    def bias(self, group: int, slopes: Float[Array, "N"] | None = None) -> Float[Array, "B G P"] | None:
        """The log weight of each slot for the G query heads of its owner, without `slopes`: `attend` adds those."""
        if self.log_weight is None:
            return None
        return jnp.broadcast_to(self.log_weight[:, None], (len(self.pos), group, self.pos.shape[1]))

    def _attend(self, rows: Readers) -> Attention:
        """Attention of rows; statistics "B K ... P" are 0 in the slots of other heads.

        A decode row reads the pool itself. Several rows, indices of slots and ALiBi read the view, where every head has
        P slots.
        """
        q, pos, statistics, reads, logits = rows.q, rows.pos, rows.statistics, rows.reads, rows.logits
        K = self.ends.shape[1]
        indices = reads.visible is not None and reads.visible.dtype != bool
        if q.shape[2] > 1 or indices or logits.slopes is not None:
            return self.view()._attend(dataclasses.replace(rows, own=False))
        mine = self._mine()
        read, bias = self._of_row(pos, reads, mine, q.shape[1] // K)

        def attention(q, k, v, owner, pos, read, statistics, bias) -> Attention:
            how = {"num_kv_heads": K, "in_order": True, "bias": bias, "logits": logits}
            return pooled_attention(q, k, v, owner, pos, read, statistics, **how)

        arrays = q, self.keys(rows.rotate), rows_of(self.v, self.owner), self.owner, pos, read, statistics, bias
        found = apart(self.how.mesh, attention, *arrays, axes=self.axes)

        def spread(spec: Columns, x: Array) -> Array:
            x = jnp.where(mine.reshape(len(mine), K, *(1,) * (x.ndim - 2), -1), x[:, None], 0.0)
            return x.reshape(len(x), -1, *x.shape[3:]) if spec.group is None else x

        return dataclasses.replace(found, columns=tuple(map(spread, statistics, found.columns)))

    def _of_row(self, row: Array, reads: Reads, mine: Array, group: int) -> tuple[Array, Array | None]:
        """(positions of the slots that one row "B 1" reads, what is added to their logits "B G P")."""
        read = self.pos if reads.visible is None else jnp.where((reads.visible & mine).any(1), self.pos, EMPTY)
        own = lambda x: self._own(jnp.broadcast_to(x, mine.shape))[:, None]
        until, weight = (None if x is None else own(x) for x in (reads.until, reads.log_weight))
        reads = Reads(None, until, weight, own(reads.delay))
        read, bias = of_row(row[:, None], read[:, None], self.bias(group), reads, group)
        return read[:, 0], bias

    def compact(self, capacity: int) -> Storage:
        return self.view().compact(capacity)


def to_pool(kv: Layer, capacity: int, most: Int[Array, "B K"]) -> Pool:
    """Moves the live slots of all heads to one pool.

    Args:
      kv: the layer.
      capacity: slots of the pool.
      most: tokens to which each head will grow. Its slots are reserved if they all fit; the rest is divided evenly.

    Raises:
      ValueError: the layer has dropped key channels.
    """
    if kv.channels is not None:
        there, here = kv.v.shape[-1], kv.channels.shape[-1]
        raise ValueError(f"a pool stores all {there} key channels, but this layer keeps {here}; use pool=False")
    (B, K, S), live = kv.pos.shape, kv.num_live
    ends, order = _ends(live, capacity, most), in_order(kv.pos)
    start = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
    nth = jnp.arange(S)[None, None]
    place = jnp.where(nth < live[..., None], start[..., None] + nth, capacity)
    slot = (jnp.arange(K)[None, :, None] * S + order).reshape(B, -1)
    source = jnp.full((B, capacity), K * S).at[jnp.arange(B)[:, None], place.reshape(B, -1)].set(slot, mode="drop")

    def move(x: Array, fill: int = 0) -> Array:
        x = x.reshape(B, K * S, *x.shape[3:])
        index = source.reshape(source.shape + (1,) * (x.ndim - 2))
        found = jnp.take_along_axis(x, jnp.minimum(index, K * S - 1), 1)
        return jnp.where(index < K * S, found, jnp.asarray(fill, x.dtype))

    weight = None if kv.log_weight is None else move(kv.log_weight)
    pos, ends = move(kv.pos, EMPTY), ends.astype(jnp.int32)
    slots_of = source[:, None] - jnp.arange(K)[None, :, None] * S
    k, v = (moved(move, x, slots_of) for x in (kv.k, kv.v))
    pool = Pool(k, v, pos, kv.fault, ends, kv.how.of_slots(move, kv.memory), weight, kv.how)

    def by_head(rows: Array) -> tuple[Array, Array]:
        return jnp.broadcast_to(rows[:, None], (B, K, *rows.shape[1:])), pool.head_pos

    def code(n: str, of_slots: Rows, of_layer: Rows) -> Rows:
        return coded(of_slots, n, kv.how.codec, pos, functools.partial(mean_of, of_layer, kv.live), by_head, pool.owner)

    return pool.replace(k=code("k", k, kv.k), v=code("v", v, kv.v)).laid_out()


def _ends(live: Int[Array, "B K"], capacity: int, most: Int[Array, "B K"]) -> Int[Array, "B K"]:
    """Where the slots of each head end, for heads of `live` tokens that grow to `most` if there is room for all."""
    K = live.shape[1]
    free = capacity - live.sum(-1, keepdims=True)
    room = jnp.maximum(most - live, 0)
    room = jnp.where(room.sum(-1, keepdims=True) <= free, room, 0)
    rest = free - room.sum(-1, keepdims=True)
    room = room + rest // K + (jnp.arange(K)[None] < rest % K).astype(jnp.int32)
    return jnp.cumsum(live + room, -1)
