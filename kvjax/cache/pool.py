"""A layer's cache as one flat pool of slots, each owned by a kv head, so that budgets of heads may differ for free.

The dense layout gives every head of a layer the slots of its largest; the pool has as many slots as all heads together
need (Ada-KV, arXiv 2407.11550, keeps a flat buffer for the same reason). Policies see a pool as a `LayerKV` whose heads
share the slots (`view`): a slot is live for its owner and dead for all others.

When the prompt ends, every head is given consecutive slots for the most tokens that it will ever hold, and keeps them:
a slot freed by eviction is filled by the same head. So a pool that holds the sum of these numbers never runs out, and
attention meets runs of one head's slots, which costs about what a dense cache costs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from kvjax.cache import mesh
from kvjax.cache.state import EMPTY, Chosen, KeyPositions, LayerKV, Rotate, Slopes, map_slots, rotated_below
from kvjax.pallas_kernels import Attention, Columns, pooled_attention
from kvjax.pallas_kernels.columns import accumulator
from kvjax.pallas_kernels.pooled import MAX_BLOCK, MIN_BLOCK, block_size, by_owner
from kvjax.pallas_kernels.pytree import pytree, static


@pytree
class PooledKV:
    """One layer's cache in the pool layout.

    Attributes:
      k, v: keys and values.
      pos: absolute position of the token in the slot, or EMPTY.
      ends: head h owns the slots from `ends[h - 1]` (0 for the first head) to before `ends[h]`; the last end is P.
      memory, rank, rotated, positions: as in `LayerKV`, with one entry a slot of the pool.
    """

    k: Float[Array, "B P H"]
    v: Float[Array, "B P H"]
    pos: Int[Array, "B P"]
    ends: Int[Array, "B K"]
    memory: PyTree[Any] = ()
    rank: Int[Array, "B P"] | None = None
    rotated: Int[Array, "B P"] | None = None
    positions: KeyPositions = static(default="original")

    @property
    def num_live(self) -> Int[Array, "B K"]:
        """Live slots of every kv head."""
        return (self.head_pos != EMPTY).sum(-1, dtype=jnp.int32)

    @property
    def num_slots(self) -> int:
        """Slots allocated for all heads together (static)."""
        return self.pos.shape[-1]

    @property
    def num_kv_heads(self) -> int:
        """K (static)."""
        return self.ends.shape[-1]

    @property
    def channels(self) -> None:
        """None: heads that drop different key channels cannot share slots."""
        return None

    @property
    def gate(self) -> None:
        """None: slots of a pool are live or dead."""
        return None

    @property
    def owner(self) -> Int[Array, "B P"]:
        """The kv head that every slot belongs to, live or dead."""
        slots = jnp.arange(self.num_slots, dtype=jnp.int32)[None]
        owner = jnp.zeros_like(self.pos)
        for head in range(self.num_kv_heads - 1):  # XLA's sum over this axis is slow on CPU
            owner = owner + (slots >= self.ends[:, head : head + 1]).astype(jnp.int32)
        return owner

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
        found, owner = x[:, 0], self.owner
        for head in range(1, self.num_kv_heads):
            mine = (owner == head).reshape(owner.shape + (1,) * (found.ndim - 2))
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

    def next_ranks(self, pos: Int[Array, "B 1"]) -> Int[Array, "B K 1"]:
        """The rank of a new token behind everything live; EMPTY for padding."""
        return jnp.where(pos == EMPTY, EMPTY, self.num_live)[..., None]

    def turned(self, rotate: Rotate) -> "PooledKV":
        """See `LayerKV`."""
        if self.rank is None or self.rotated is None:
            return self
        moved = jnp.where(self.pos == EMPTY, 0, self.rank - self.rotated)
        k = lax.cond((moved != 0).any(), lambda: _rotated(rotate, self.k, moved), lambda: self.k)
        return dataclasses.replace(self, k=k, rotated=self.rank)

    def insert(self, k: Float[Array, "B K 1 H"], v: Float[Array, "B K 1 H"], pos: Int[Array, "B 1"]) -> "PooledKV":
        """See `insert_pooled`."""
        return insert_pooled(self, k, v, pos)

    def keys(self, rotate: Rotate) -> Float[Array, "B P H"]:
        """Keys as queries meet them: rotated."""
        if self.positions != "compact":
            return self.k
        rank = jnp.zeros_like(self.pos) if self.rank is None else jnp.maximum(self.rank, 0)
        return rotated_below(rotate, self.k[:, None], rank[:, None], self.num_slots)[:, 0].astype(self.k.dtype)

    def bias(self, slopes: Slopes) -> Float[Array, "B G P"]:
        """What slopes add to the logits of every slot with the query heads of its owner; see `LayerKV`."""
        places, newest = self.pos, jnp.broadcast_to(self.pos.max(-1, keepdims=True), self.ends.shape)
        if self.rank is not None:
            places, newest = self.rank, self.num_live - 1
        dtype = accumulator(self.v.dtype)
        slope = jnp.asarray(slopes, dtype).reshape(1, self.num_kv_heads, -1)
        slope = jnp.broadcast_to(slope, (len(self.pos), *slope.shape[1:]))
        behind = places[:, None] - by_owner(newest[..., None], self.owner)
        return by_owner(slope, self.owner) * behind.astype(dtype)

    def attend(
        self,
        q: Float[Array, "B N 1 H"],
        keys: Float[Array, "B P H"],
        q_pos: Int[Array, "B 1"],
        columns: Sequence[Columns],
        *,
        visible: Bool[Array, "B K P"] | Chosen | None = None,
        **options: Any,
    ) -> Attention:
        """See `LayerKV`; statistics are those of the view, 0 in the slots of other heads.

        Slots that are not named are hidden, but the whole pool is read.
        """
        visible = visible.mask(self.num_slots) if isinstance(visible, Chosen) else visible
        read = self.pos if visible is None else jnp.where(visible.any(1), self.pos, EMPTY)
        K, columns = self.num_kv_heads, tuple(columns)
        found = pooled_attention(
            q, keys, self.v, self.owner, q_pos, read, columns, num_kv_heads=K, in_order=True, **options
        )
        measured = (self._by_head(spec, x) for spec, x in zip(columns, found.columns, strict=True))
        return dataclasses.replace(found, columns=tuple(measured))

    def _by_head(self, spec: Columns, x: Float[Array, "B *head P"]) -> Float[Array, "B _ *row P"]:
        """A pool's statistic as policies know it."""
        K = self.num_kv_heads
        mine = self.owner[:, None] == jnp.arange(K, dtype=jnp.int32)[None, :, None]
        x = jnp.where(mine.reshape(x.shape[0], K, *(1,) * (x.ndim - 2), -1), x[:, None], 0.0)
        return x.reshape(x.shape[0], -1, *x.shape[3:]) if spec.group is None else x


def _rotated(rotate: Rotate, k: Float[Array, "B P H"], at: Int[Array, "B P"]) -> Float[Array, "B P H"]:
    """A pool's keys rotated by as much as its slots' ranks have changed."""
    return rotate(k[:, None], at[:, None])[:, 0].astype(k.dtype)


def pool_slots(total: int) -> int:
    """Slots of a pool for `total` tokens: a multiple of a power of two where that costs less than one slot in 64.

    Attention splits such pools into blocks (`kvjax.pallas_kernels.pooled`).
    """
    block = min(MAX_BLOCK, 1 << max(0, (total // 64).bit_length() - 1))
    return total if block < MIN_BLOCK else -(-total // block) * block


@functools.partial(jax.jit, static_argnames="capacity")
def to_pool(kv: LayerKV, capacity: int, most: Int[Array, "B K"] | None = None) -> PooledKV:
    """Moves the live slots of all heads into one pool of `capacity` slots; the rest are dead.

    Slots lie head by head in the order they had, each head's followed by its room. If the heads together hold more than
    `capacity` live tokens, the plan was made for other prompts: values become NaN instead of tokens being lost
    silently. On a mesh, every device that shares the heads has the whole pool.

    Args:
      kv: the layer.
      capacity: slots of the pool.
      most: the most tokens that each head will hold. What the pool has beyond their sum is divided equally, and so is
        everything beyond the live tokens if None, or if the pool has not as much as their sum.
    """
    return mesh.everywhere(functools.partial(_pooled, capacity=capacity), kv, most)


def _pooled(kv: LayerKV, most: Int[Array, "B K"] | None, capacity: int) -> PooledKV:
    B, K, S, _ = kv.k.shape
    live = kv.num_live
    room = jnp.zeros_like(live) if most is None else jnp.maximum(most - live, 0)
    free = jnp.maximum(capacity - live.sum(-1, keepdims=True), 0)
    room = jnp.where(room.sum(-1, keepdims=True) <= free, room, 0)
    rest = free - room.sum(-1, keepdims=True)
    room = room + rest // K + (jnp.arange(K, dtype=jnp.int32)[None] < rest % K).astype(jnp.int32)
    ends = jnp.cumsum(live + room, axis=-1, dtype=jnp.int32)
    place = _starts(ends)[..., None] + jnp.cumsum(kv.live, axis=-1, dtype=jnp.int32) - 1
    place = jnp.where(kv.live, place, capacity).reshape(B, K * S)
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

    overflow = (live.sum(-1) > capacity)[:, None, None]
    return PooledKV(
        gather(kv.k),
        jnp.where(overflow, jnp.asarray(jnp.nan, kv.v.dtype), gather(kv.v)),
        gather(kv.pos, EMPTY),
        jnp.minimum(ends, capacity),
        map_slots(gather, kv.memory),
        None if kv.rank is None else gather(kv.rank, EMPTY),
        None if kv.rotated is None else gather(kv.rotated, EMPTY),
        kv.positions,
    )


def _starts(ends: Int[Array, "B K"]) -> Int[Array, "B K"]:
    """The first slot of every head."""
    return jnp.pad(ends[:, :-1], [(0, 0), (1, 0)])


def _first_dead(kv: PooledKV) -> Int[Array, "B K"]:
    """The first dead slot that every head owns, P where it has none.

    By blocks, since a reduction of all slots for every head would cost more than all else that inserts a token: the
    first dead slot from a head's first one on lies in the block where the head begins, or is the first of later blocks.
    """
    B, P = kv.pos.shape
    block = block_size(P)
    starts = _starts(kv.ends)
    candidates = jnp.where(kv.pos == EMPTY, lax.broadcasted_iota(jnp.int32, kv.pos.shape, 1), P)
    candidates = candidates.reshape(B, P // block, block)
    begin = jnp.minimum(starts, P - 1) // block
    inside = candidates.at[jnp.arange(B)[:, None], begin].get(mode="promise_in_bounds")  # "B K block"
    inside = jnp.where(inside >= starts[..., None], inside, P).min(-1)
    later = jnp.arange(P // block, dtype=jnp.int32)[None, None] > begin[..., None]
    later = jnp.where(later, candidates.min(-1)[:, None], P).min(-1)
    first = jnp.minimum(inside, later)
    return jnp.where(first < kv.ends, first, P)


def insert_pooled(
    kv: PooledKV,
    k: Float[Array, "B K 1 H"],
    v: Float[Array, "B K 1 H"],
    pos: Int[Array, "B 1"],
) -> PooledKV:
    """Writes one token of every head into the first dead slot that it owns, in place under `jit`.

    A token whose position is EMPTY changes nothing that is live. A head whose slots are all live has been driven past
    its plan, and values become NaN.
    """
    B, K, _, _ = k.shape
    P, place = kv.num_slots, _first_dead(kv)
    rank = None if kv.rank is None else kv.next_ranks(pos)[..., 0]
    overflow = (place == P) & (pos != EMPTY)
    batch = jnp.arange(B)[:, None]
    write = lambda x, new: x.at[batch, place].set(new.astype(x.dtype), mode="drop", unique_indices=True)
    # Where a head has no slot, all heads of the sequence write NaN: several may be sent to the same slot.
    values = jnp.where(overflow.any(-1)[:, None, None], jnp.nan, v[:, :, 0]).astype(kv.v.dtype)
    spoiled = jnp.where(overflow, jnp.maximum(kv.ends - 1, 0), place)
    blank = lambda m: write(m, jnp.zeros((B, K, *m.shape[2:]), m.dtype))
    return dataclasses.replace(
        kv,
        k=write(kv.k, k[:, :, 0]),
        v=kv.v.at[batch, spoiled].set(values, mode="drop"),
        pos=write(kv.pos, jnp.broadcast_to(pos, (B, K))),
        memory=map_slots(blank, kv.memory),
        rank=None if kv.rank is None else write(kv.rank, rank),
        rotated=None if kv.rotated is None else write(kv.rotated, rank),
    )
