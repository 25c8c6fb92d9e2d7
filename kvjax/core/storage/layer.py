"""A layer's slots, as many for every head."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.contract import EMPTY, LAST, PerHead, PerSlot, Reads, value
from kvjax.pallas_kernels import attention, reference
from kvjax.pallas_kernels.columns import Attention
from kvjax.pallas_kernels.pytree import pytree, static


@value
class Keeps:
    """What is static about what a layer stores: how (see `Layout`), what its policy writes, which memory is of heads."""

    positions: str = "original"
    sinks: int = 0
    writes: tuple = ()
    per_head: tuple = ()

    def of_slots(self, change, memory):
        """Memory whose numbers of slots are changed, and nothing else."""
        leaves, tree = jax.tree.flatten(memory)
        return tree.unflatten(x if own else change(x) for x, own in zip(leaves, self.per_head, strict=bool(leaves)))


def allocated(specs, batch: int, heads: int, slots: int = 0):
    """(arrays, which of them belong to heads) for a tree of `PerSlot` and `PerHead`."""
    spec = lambda x: isinstance(x, PerSlot | PerHead)
    leaves, tree = jax.tree.flatten(specs, is_leaf=spec)
    if wrong := [x for x in leaves if not spec(x)]:
        raise TypeError(f"memory is a tree of PerSlot and PerHead, not of {type(wrong[0]).__name__}")
    own = lambda x: jnp.full((batch, heads, *x.shape), x.fill, x.dtype)
    one = lambda x: own(x) if isinstance(x, PerHead) else jnp.zeros((batch, heads, slots, *x.shape), x.dtype)
    return tree.unflatten(map(one, leaves)), tuple(isinstance(x, PerHead) for x in leaves)


@pytree
class Layer:
    """One layer's cache. A slot is live if `pos >= 0`; the order of slots never matters.

    Attributes:
      k, v: "B K S H". Keys are rotated at `pos`, or stored unrotated where a token's place is its rank.
      pos: "B K S", position of each slot's token in the text.
      memory: what the policy remembers: arrays "B K S ...", or of heads "B K ...".
      log_weight: "B K S", the logarithm of what each slot counts in attention; None for one each.
      channels: "B K C", the key channels that are left, or will be after compaction; None for all.
    """

    k: Any
    v: Any
    pos: Any
    memory: Any = ()
    log_weight: Any = None
    channels: Any = None
    how: Keeps = static(default=Keeps())

    @property
    def live(self):
        """Slots that hold a token: "B K S"."""
        return self.pos != EMPTY

    @property
    def num_live(self):
        """Tokens of every head: "B K"."""
        return self.live.sum(-1, dtype=jnp.int32)

    @property
    def room(self):
        """Dead slots of every head: "B K"."""
        return self.pos.shape[2] - self.num_live

    @property
    def head_pos(self):
        """The positions that every head holds; a pool has the same property."""
        return self.pos

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(x.nbytes for x in jax.tree.leaves(self))

    def replace(self, **fields) -> "Layer":
        """The same layer with other fields."""
        return dataclasses.replace(self, **fields)

    def keep(self, mask) -> "Layer":
        """Marks all other slots dead; nothing moves."""
        return self.replace(pos=jnp.where(mask, self.pos, EMPTY))

    def view(self) -> "Layer":
        """The layer as policies see it."""
        return self

    def put(self, view: "Layer") -> "Layer":
        """What a policy made of the view."""
        return view

    def take(self, rows) -> "Layer":
        """The sequences `rows`."""
        return jax.tree.map(lambda x: x[rows], self)

    def where(self, active, old: "Layer") -> "Layer":
        """This layer for sequences that are active "B", what `old` says of others; their dead slots may hold anything."""
        return where(self, active, old)

    def places(self, pos):
        """Where rows at positions "B T", just appended, stand: "B K T", or "B 1 T"."""
        if self.how.positions != "rank":
            return pos[:, None]
        before = self.num_live - (pos != EMPTY).sum(-1, keepdims=True)
        return jnp.where(
            pos[:, None] == EMPTY, EMPTY, before[..., None] + jnp.cumsum(pos != EMPTY, axis=-1)[:, None] - 1
        )

    def keys(self, rotate):
        """Keys as queries meet them: rotated."""
        if self.how.positions == "shifted" and (n := self.how.sinks):
            gap = self.pos.max(-1, keepdims=True) + 1 - self.num_live[..., None]
            nearer = rotate(self.k[:, :, :n], jnp.broadcast_to(gap, self.pos[:, :, :n].shape))
            return jnp.concatenate([nearer.astype(self.k.dtype), self.k[:, :, n:]], axis=2)
        if self.how.positions != "rank":
            return jnp.pad(self.k, [(0, 0)] * 3 + [(0, self.v.shape[-1] - self.k.shape[-1])])
        rank = jnp.argsort(jnp.argsort(jnp.where(self.live, self.pos, LAST), axis=-1), axis=-1)
        return rotate(self.k, jnp.where(self.live, rank, 0))

    def append(self, k, v, pos, *, grow: bool) -> "Layer":
        """New rows "B K T H" at positions "B T", as new slots or in dead ones; a row at EMPTY is padding."""
        if self.k.shape[-1] < k.shape[-1]:
            k = jnp.take_along_axis(k, self.channels[:, :, None], -1)
        if grow:
            join = lambda old, new: jnp.concatenate([old, new.astype(old.dtype)], axis=2)
            blank = lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, k.shape[2])] + [(0, 0)] * (x.ndim - 3))
            pos = jnp.broadcast_to(pos[:, None], k.shape[:3])
            return self._after(lambda old, new, row: join(old, new), blank, k, v, pos)
        B, K, S = self.pos.shape
        at, rows = dead_slots(~self.live, pos), pos.shape[1]
        at = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], at
        at = at if rows > 1 else tuple(x[..., 0] for x in at)
        write = lambda x, new: x.at[at].set(jnp.asarray(new).astype(x.dtype), mode="drop", unique_indices=rows == 1)
        pos = jnp.broadcast_to(pos[:, None], (B, K, rows)) if rows > 1 else jnp.broadcast_to(pos, (B, K))
        first = lambda x: x if rows > 1 else x[:, :, 0]
        return self._after(
            lambda old, new, row: write(old, first(new) if row else new), lambda x: write(x, 0), k, v, pos
        )

    def _after(self, join, blank, k, v, pos):
        weight = None if self.log_weight is None else blank(self.log_weight)
        memory = self.how.of_slots(blank, self.memory)
        return self.replace(
            k=join(self.k, k, True),
            v=join(self.v, v, True),
            pos=join(self.pos, pos, False),
            memory=memory,
            log_weight=weight,
        )

    def bias(self, group: int, slopes=None):
        """What is added to logits, "B N S", or None; `slopes` are ALiBi's."""
        bias = None if self.log_weight is None else jnp.repeat(self.log_weight, group, axis=1)
        if slopes is None:
            return bias
        behind = self.pos - self.pos.max(-1, keepdims=True)
        slope = jnp.asarray(slopes, jnp.float32)[None, :, None] * jnp.repeat(behind, group, 1)
        return slope if bias is None else bias + slope

    def attend(
        self,
        q,
        pos,
        statistics=(),
        reads: Reads | None = None,
        *,
        rotate,
        scale=None,
        softcap=None,
        window=None,
        slopes=None,
    ):
        """Attention of rows "B N T H" at positions "B T" to what they read, and statistics."""
        reads, G, H = reads or Reads(), q.shape[1] // self.pos.shape[1], q.shape[-1]
        if self.k.shape[-1] < H:
            scale = H**-0.5 if scale is None else scale
            q = jnp.take_along_axis(q, jnp.repeat(self.channels[:, :, None], G, 1), -1)
            q = jnp.pad(q, [(0, 0)] * 3 + [(0, H - q.shape[-1])])
        keys, v, read, bias, visible = self.keys(rotate), self.v, self.pos, self.bias(G, slopes), reads.visible
        how = {"scale": scale, "window": window, "softcap": softcap}
        if visible is not None and visible.dtype == bool:
            read = jnp.where(visible, read, EMPTY)
        if reads.until is not None or reads.log_weight is not None:
            if visible is not None and visible.dtype != bool:
                raise ValueError("numbers of slots cannot be combined with until or log_weight; give a mask")
            if q.shape[2] > 1:
                return _written_out(q, keys, v, pos, read, bias, reads, statistics, **how)
            row = pos[:, :, None]
            read = read if reads.until is None else jnp.where(row < reads.until, read, EMPTY)
            if reads.log_weight is not None:
                more = jnp.repeat(jnp.where(row - read >= reads.delay, reads.log_weight, 0.0), G, axis=1)
                bias = more if bias is None else bias + more
        if visible is None or visible.dtype == bool:
            return attention(q, keys, v, pos, read, columns=statistics, bias=bias, **how)
        index = jnp.maximum(visible, 0)
        read = jnp.where(visible >= 0, take(read, index), EMPTY)
        bias = None if bias is None else take(bias, jnp.repeat(index, G, 1))
        found = attention(q, take(keys, index), take(v, index), pos, read, columns=statistics, bias=bias, **how)
        return dataclasses.replace(found, columns=tuple(_laid(x, visible, self.pos.shape[2]) for x in found.columns))


def _laid(x, index, S: int):
    """Statistics "B K ... R" of some slots, in all "B K ... S"."""
    index = jnp.repeat(jnp.where(index >= 0, index, S), x.shape[1] // index.shape[1], axis=1)
    index = jnp.broadcast_to(index.reshape(*index.shape[:2], *(1,) * (x.ndim - 3), -1), x.shape)
    return jnp.put_along_axis(jnp.zeros((*x.shape[:-1], S + 1), x.dtype), index, x, -1, inplace=False)[..., :S]


def _written_out(q, k, v, q_pos, kv_pos, bias, reads: Reads, statistics, *, scale, window, softcap):
    """Attention whose rows read different slots, by the specification: the whole matrix, no kernel."""
    (B, N, T, H), K = q.shape, k.shape[1]
    x = jnp.einsum("bkgth,bksh->bkgts", q.reshape(B, K, N // K, T, H), k) * (H**-0.5 if scale is None else scale)
    x = x if softcap is None else softcap * jnp.tanh(x / softcap)
    x = x if bias is None else x + bias.reshape(B, K, N // K, 1, -1)
    row, wide = q_pos[:, None, :, None], lambda y: jnp.broadcast_to(y, kv_pos.shape)[:, :, None]
    if reads.log_weight is not None:
        x = x + jnp.where(row - kv_pos[:, :, None] >= wide(reads.delay), wide(reads.log_weight), 0.0)[:, :, None]
    seen = reference.visible(q_pos, kv_pos, window)
    seen = seen if reads.until is None else seen & (row < wide(reads.until))
    p, lse = reference._softmax(x, seen)
    out = jnp.einsum("bkgts,bksh->bkgth", p, v).reshape(B, N, T, -1)
    measured = tuple(reference.column(spec, p, x, seen, q_pos, kv_pos, window) for spec in statistics)
    return Attention(out, lse.reshape(B, N, T), measured)


def dead_slots(free, pos):
    """A slot for every row at positions "B T" among those that are free "B K S", S for none: "B K T"."""
    S = free.shape[2]
    if pos.shape[1] == 1:
        return jnp.where(free, lax.broadcasted_iota(jnp.int32, free.shape, 2), S).min(-1, keepdims=True)
    order = jnp.argsort(~free, axis=-1, stable=True)
    nth, real = jnp.cumsum(pos != EMPTY, axis=-1)[:, None] - 1, (pos != EMPTY)[:, None]
    fits = real & (nth < free.sum(-1, keepdims=True))
    return jnp.where(fits, jnp.take_along_axis(order, jnp.clip(nth, 0, S - 1), -1), S)


def where(new, active, old):
    """See `Layer.where`: what may differ in live slots is picked, and memory."""
    pick = lambda x, y: jnp.where(active.reshape(-1, *(1,) * (x.ndim - 1)), x, y)
    names = {"pos", "memory"} | set(new.how.writes)
    return new.replace(**{n: jax.tree.map(pick, getattr(new, n), getattr(old, n)) for n in sorted(names)})


def empty(info, batch: int, dtype, memory=(), layout=None, writes=(), slots: int = 0) -> Layer:
    """A layer without tokens, for a policy's memory, layout and writes."""
    zeros = jnp.zeros((batch, info.num_kv_heads, slots, info.head_dim), dtype)
    arrays, per_head = allocated(memory, batch, info.num_kv_heads, slots)
    keeps = {} if layout is None else {"positions": layout.positions, "sinks": layout.sinks}
    weight = jnp.zeros(zeros.shape[:3], jnp.float32) if "log_weight" in writes else None
    return Layer(
        zeros,
        zeros,
        jnp.full(zeros.shape[:3], EMPTY, jnp.int32),
        arrays,
        weight,
        how=Keeps(writes=tuple(writes), per_head=per_head, **keeps),
    )


def in_order(pos):
    """Slots by increasing position, dead ones last: "B K S"."""
    return jnp.argsort(jnp.where(pos == EMPTY, LAST, pos), axis=-1, stable=True)


def take(x, index, fill=0, width=None):
    """Slots "B K W" of an array "B K S ...", followed by blank ones up to `width`."""
    x = jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 3)), axis=2)
    more = 0 if width is None else max(width - x.shape[2], 0)
    return jnp.pad(x, [(0, 0), (0, 0), (0, more)] + [(0, 0)] * (x.ndim - 3), constant_values=fill)


def compact(kv: Layer, capacity: int, reserve=None):
    """Live slots in order of position, in `capacity` slots: this is what frees memory. With `reserve`, see `to_pool`."""
    if reserve is not None:
        from kvjax.core.storage.pool import to_pool

        return to_pool(kv, capacity, reserve)
    k = kv.k
    if kv.channels is not None and k.shape[-1] == kv.v.shape[-1]:
        k = jnp.take_along_axis(k, kv.channels[:, :, None], -1)
    index = in_order(kv.pos)[..., :capacity]
    move = lambda x, fill=0: take(x, index, fill, capacity)
    weight = None if kv.log_weight is None else move(kv.log_weight)
    return kv.replace(
        k=move(k), v=move(kv.v), pos=move(kv.pos, EMPTY), memory=kv.how.of_slots(move, kv.memory), log_weight=weight
    )


Layer.compact = compact
