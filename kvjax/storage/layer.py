"""A layer's cache: S slots for every head."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from kvjax.contract import EMPTY, LAST, LayerInfo, LayerView, PerHead, PerSlot, Policy, Reads, Rotate
from kvjax.pallas_kernels import Logits, attention, reference
from kvjax.pallas_kernels.columns import Attention, accumulator
from kvjax.pallas_kernels.kinds import Dtype
from kvjax.pallas_kernels.logits import linear_bias
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.storage.codes import Codes, Rows, attend_codes, coded, first_slots, mean_of, moved, rows_of, written
from kvjax.storage.mesh import apart, attention_on
from kvjax.storage.protocol import Keeps, Readers, Storage


@pytree
class Layer(LayerView, Storage):
    """One layer's cache.

    Attributes:
      k: keys, C = H channels unless some were dropped. Rotated to `pos`, or not at all where positions are ranks.
      memory: arrays "B K S ...", or "B K ..." where they belong to heads.
      channels: the key channels that are left, or will be after compaction; None for all.
    """

    k: Rows  # pyrefly: ignore[bad-override]  # what policies see is decoded
    v: Rows  # pyrefly: ignore[bad-override]
    how: Keeps = static(default=Keeps())

    @property
    def head_pos(self) -> Int[Array, "B K S"]:
        return self.pos

    def view(self) -> "Layer":
        return self

    def _put(self, view: LayerView, changed: dict[str, Any]) -> "Layer":
        if "k" in changed and self._packed:
            changed["k"] = jnp.take_along_axis(changed["k"], cast(Array, self.channels)[:, :, None], -1)
        for n in ("k", "v"):
            if n in changed and isinstance(codes := getattr(self, n), Codes):
                changed[n] = codes.changed(codes.rows(), changed[n])
        told = {n: getattr(view, n) for n in ("pos", "fault", "memory", "channels")}
        return self.replace(**told, **changed)

    # Whether keys have the channels alone that are left.
    _packed = property(lambda self: self.channels is not None and self.channels.shape[-1] == self.k.shape[-1])

    def keys(self, rotate: Rotate) -> Float[Array, "B K S H"]:
        k = rows_of(self.k)
        if self._packed:
            at = jnp.broadcast_to(cast(Array, self.channels)[:, :, None], k.shape)
            k = jnp.put_along_axis(jnp.zeros(self.v.shape, k.dtype), at, k, -1, inplace=False)
        if self.how.positions == "shifted" and (n := self.how.sinks):
            nearer = rotate(k[:, :, :n], jnp.broadcast_to(self._gap, self.pos[:, :, :n].shape))
            return jnp.concatenate([nearer.astype(k.dtype), k[:, :, n:]], axis=2)
        return rotate(k, jnp.where(self.live, self._rank, 0)) if self.how.positions == "rank" else k

    @property
    def _gap(self) -> Int[Array, "B K 1"]:
        """Tokens that each head has evicted, by which its first tokens are shifted."""
        return self.pos.max(-1, keepdims=True) + 1 - self.num_live[..., None]

    @property
    def _rank(self) -> Int[Array, "B K S"]:
        """The rank of each live slot's token among those of its head."""
        return jnp.argsort(jnp.argsort(jnp.where(self.live, self.pos, LAST), axis=-1), axis=-1)

    def free(self, pos: Int[Array, "B T"]) -> Int[Array, "B K T"]:
        each = jnp.broadcast_to(pos[:, None], (*self.pos.shape[:2], pos.shape[1]))
        return apart(self.how.mesh, lambda held, pos: dead_slots(held, pos[:, 0]), self.pos, each)

    def append(
        self,
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T V"],
        pos: Int[Array, "B T"],
        slots: Int[Array, "B K T"] | None = None,
    ) -> "Layer":
        if self._packed:
            k = jnp.take_along_axis(k, cast(Array, self.channels)[:, :, None], -1)
        each = jnp.broadcast_to(pos[:, None], k.shape[:3])
        if slots is None:
            join = lambda old, new: jnp.concatenate([old, new.astype(old.dtype)], axis=2)
            new_slots = jnp.broadcast_to(self.pos.shape[2] + jnp.arange(k.shape[2]), each.shape)
            behind = lambda old, new: written(join, old, new, each, new_slots)
            blank = lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, k.shape[2])] + [(0, 0)] * (x.ndim - 3))
            return with_rows(self, behind, blank, k, v, each)
        return apart(self.how.mesh, filled, self, k, v, each, slots)

    def bias(self, group: int, slopes: Float[Array, "N"] | None = None) -> Float[Array, "B N S"] | None:
        bias = None if self.log_weight is None else jnp.repeat(self.log_weight, group, axis=1)
        if slopes is None:
            return bias
        at, how = self.pos, self.how
        if how.positions == "shifted":
            at = at.at[:, :, : how.sinks].add(self._gap)
        elif how.positions == "rank":
            at = jnp.where(self.live, self._rank, EMPTY)
        slope = linear_bias(slopes, at)
        return slope if bias is None else bias + slope

    def _attend(self, rows: Readers) -> Attention:
        q, pos, reads, logits = rows.q, rows.pos, rows.reads, rows.logits
        G, mesh = q.shape[1] // self.pos.shape[1], self.how.mesh
        attend: Any = attention if mesh is None else functools.partial(attention_on, mesh)
        read, bias, visible = self.pos, self.bias(G, logits.slopes), reads.visible
        how: dict[str, Any] = {"columns": rows.statistics, "logits": dataclasses.replace(logits, slopes=None)}
        if Codes in (type(self.k), type(self.v)):
            by_tiles = q.shape[2] == 1 and mesh is None
            attend = attend_codes if by_tiles else functools.partial(_decoded, attend)
        if self.how.positions == "shifted" and self.how.sinks and q.shape[2] == 1 and logits.softcap is None:
            nearer = self._nearer(q, pos, rows.rotate, logits)
            keys, bias = self.k, nearer if bias is None else bias + nearer
        elif self._packed and self.how.positions == "original":  # of all channels, those alone that are no zeros
            keys = jnp.pad(cast(Array, self.k), [(0, 0)] * 3 + [(0, q.shape[-1] - self.k.shape[-1])])
            q = self._fewer_channels(q, G)
        else:
            keys = self.k if self.how.positions == "original" else self.keys(rows.rotate)
        index = visible if visible is not None and visible.dtype != bool else reads.at
        if visible is not None and index is None:
            read = jnp.where(visible, read, EMPTY)
        if reads.until is not None or reads.log_weight is not None:
            if index is not None:
                raise ValueError("indices of slots cannot be combined with until or log_weight; give a mask")
            if q.shape[2] > 1:  # rows read different slots: by the whole T x S matrix
                row, wide = pos[:, None, :, None], lambda y: jnp.broadcast_to(y, read.shape)[:, :, None]
                if reads.log_weight is not None:
                    behind = row - read[:, :, None] >= wide(reads.delay)
                    how["more"] = jnp.where(behind, wide(reads.log_weight), 0.0)
                how["reads"] = None if reads.until is None else row < wide(reads.until)
                found = reference.attention(q, rows_of(keys), rows_of(self.v), pos, read, bias, logits.nothing, **how)
                return dataclasses.replace(found, out=found.out.astype(q.dtype))
            read, bias = of_row(pos[:, :, None], read, bias, reads, G)
        if index is None:
            return attend(q, keys, self.v, pos, read, bias=bias, own=rows.own, **how)
        slot = jnp.maximum(index, 0)
        read = jnp.where(index >= 0, take(read, slot), EMPTY)
        bias = None if bias is None else take(bias, jnp.repeat(slot, G, 1))
        k, v = (moved(lambda part: take(part, slot), x, index) for x in (keys, self.v))
        found = attend(q, k, v, pos, read, bias=bias, **how)
        columns = tuple(_spread(x, index, self.pos.shape[2]) for x in found.columns)
        return dataclasses.replace(found, columns=columns)

    def _nearer(
        self, q: Float[Array, "B N 1 H"], pos: Int[Array, "B 1"], rotate: Rotate, logits: Logits
    ) -> Float[Array, "B N S"]:
        """The change of the newest row's logits by the shift of first tokens, without a copy of all keys."""
        first, (B, N, _, H) = rows_of(first_slots(self.k, self.how.sinks)), q.shape
        gap = pos[:, None] + 1 - self.num_live[..., None]  # `_gap`, of which one reduction is known
        wide = lambda x: x.astype(accumulator(q.dtype))
        turned = rotate(first, jnp.broadcast_to(gap, first.shape[:3])).astype(first.dtype)
        rows = wide(q).reshape(B, first.shape[1], -1, H) * logits.factor(H)
        more = jnp.einsum("bkgh,bksh->bkgs", rows, wide(turned) - wide(first)).reshape(B, N, -1)
        return jnp.pad(more, ((0, 0), (0, 0), (0, self.pos.shape[2] - more.shape[2])))

    def _fewer_channels(self, q: Float[Array, "B N T H"], group: int) -> Float[Array, "B N T H"]:
        """Queries with the channels that keys have, padded with zeros."""
        channels = cast(Array, self.channels)  # as keys have fewer than queries
        fewer = jnp.take_along_axis(q, jnp.repeat(channels[:, :, None], group, 1), -1)
        return jnp.pad(fewer, [(0, 0)] * 3 + [(0, q.shape[-1] - fewer.shape[-1])])

    def compact(self, capacity: int) -> Storage:
        if self.how.mesh is not None:
            how = dataclasses.replace(self.how, mesh=None)
            return apart(self.how.mesh, lambda kv: kv.replace(how=how).compact(capacity).replace(how=kv.how), self)
        k, codec, live = self.k, self.how.codec, self.live
        if self.channels is not None and not self._packed:
            k = jnp.take_along_axis(cast(Array, k), self.channels[:, :, None], -1)
        index = in_order(self.pos)[..., :capacity]
        move = lambda x, fill=0: take(x, index, fill, capacity)
        pos, fields = move(self.pos, EMPTY), {"log_weight": jax.tree.map(move, self.log_weight)}
        for n, x in (("k", k), ("v", self.v)):
            mean, by_head = functools.partial(mean_of, x, live), lambda rows: (rows, pos)
            fields[n] = coded(moved(move, x, index), n, codec, pos, mean, by_head)
        return self.replace(**fields, pos=pos, memory=self.how.of_slots(move, self.memory))


# ------------------------------------------------------------------------------------------------- attention


def _decoded(attend: Callable[..., Attention], q: Array, k: Rows, v: Rows, *args: Any, **how: Any) -> Attention:
    """Attention to codes that are decoded first."""
    return attend(q, rows_of(k), rows_of(v), *args, **how)


def of_row(row: Array, read: Array, bias: Array | None, reads: Reads, group: int) -> tuple[Array, Array | None]:
    """(positions of the slots that one row "B 1 1" reads, what is added to their logits)."""
    read = read if reads.until is None else jnp.where(row < reads.until, read, EMPTY)
    if reads.log_weight is None:
        return read, bias
    more = jnp.repeat(jnp.where(row - read >= reads.delay, reads.log_weight, 0.0), group, axis=1)
    return read, more if bias is None else bias + more


def _spread(x: Array, index: Int[Array, "B K R"], num_slots: int) -> Array:
    """Scatters statistics "B _ ... R" of the slots `index` to all slots "B _ ... S"; 0 elsewhere."""
    index = jnp.repeat(jnp.where(index >= 0, index, num_slots), x.shape[1] // index.shape[1], axis=1)
    index = jnp.broadcast_to(index.reshape(*index.shape[:2], *(1,) * (x.ndim - 3), -1), x.shape)
    zeros = jnp.zeros((*x.shape[:-1], num_slots + 1), x.dtype)
    return jnp.put_along_axis(zeros, index, x, -1, inplace=False)[..., :num_slots]


# ------------------------------------------------------------------------------------------------- slots


def in_order(pos: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    """Indices of slots by increasing position, dead ones last."""
    return jnp.argsort(jnp.where(pos == EMPTY, LAST, pos), axis=-1, stable=True)


def take(
    x: Shaped[Array, "B K S *rest"], index: Int[Array, "B K W"], fill: int | float = 0, width: int | None = None
) -> Shaped[Array, "B K _ *rest"]:
    """The slots `index` of an array, followed by slots that hold `fill` up to `width`."""
    x = jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 3)), axis=2)
    more = 0 if width is None else max(width - x.shape[2], 0)
    return jnp.pad(x, [(0, 0), (0, 0), (0, more)] + [(0, 0)] * (x.ndim - 3), constant_values=fill)


def write_rows(x: Shaped[Array, "..."], at: tuple[Array, ...], new: Array | int, unique: bool) -> Shaped[Array, "..."]:
    """An array with new rows at indices of its first axes; those beyond it are dropped.

    One number of each list is written in the pass that reads it next, where a scatter would be a kernel of its own. On
    CPUs a 16-bit row is too, and several are looked up slot by slot: XLA would turn all of `x` into float32 to scatter
    them, and back.
    """
    if not x.size:  # values that are channels of keys
        return x
    new, axis = jnp.asarray(new).astype(x.dtype), len(at) - 1
    put = lambda x, new, *at: x.at[at].set(new, mode="drop", unique_indices=unique)
    numbers = x.ndim == len(at) == at[-1].ndim + 1
    if not (unique and numbers) and (x.dtype.itemsize != 2 or not (unique or new.ndim)):
        return put(x, new, *at)
    if not unique:
        rows = new.reshape(-1, *x.shape[axis + 1 :])
        number = jnp.arange(len(rows), dtype=jnp.int32).reshape(new.shape[: new.ndim - x.ndim + axis + 1])
        which = put(jnp.full(x.shape[: axis + 1], -1, jnp.int32), number, *at)
        there = (which >= 0).reshape(*which.shape, *(1,) * (x.ndim - axis - 1))
        return lax.platform_dependent(x, new, *at, cpu=lambda x, *_: jnp.where(there, rows[which], x), default=put)
    lists = lambda y, rest: jnp.moveaxis(y.reshape(*x.shape[:axis], -1, *rest), axis, 0)  # a row of each list
    rows = lists(jnp.broadcast_to(new, at[-1].shape + x.shape[axis + 1 :]), x.shape[axis + 1 :])
    slots = lists(at[-1], (1,) * (x.ndim - axis - 1))
    place = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    at_place = lambda x, one: jnp.where(place == jnp.expand_dims(one[0], axis), jnp.expand_dims(one[1], axis), x)
    select = lambda x, *_: functools.reduce(at_place, zip(slots, rows, strict=True), x)
    return select(x) if numbers else lax.platform_dependent(x, new, *at, cpu=select, default=put)


def with_rows(kv: Any, write: Callable[..., Rows], blank: Callable[[Array], Array], *rows: Array) -> Any:
    """A layer or a pool with rows of `k`, `v` and `pos`; log weights and memory are `blank` in their slots."""
    weight = jax.tree.map(blank, kv.log_weight)
    k, v, pos = rows
    rows = k, v[..., : kv.v.shape[-1]], pos
    fields = {n: write(getattr(kv, n), x) for n, x in zip(("k", "v", "pos"), rows, strict=True)}
    return kv.replace(**fields, log_weight=weight, memory=kv.how.of_slots(blank, kv.memory))


def filled(kv: Any, k: Array, v: Array, pos: Array, slots: Array) -> Any:
    """A layer or a pool with new rows in these slots; a single row, that of a decode step, has no axis for rows."""
    B, K, rows = slots.shape
    row = lambda x: x if rows > 1 else x[:, :, 0]
    places = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
    at = tuple(map(row, (*places[: kv.pos.ndim - 1], slots)))  # a pool's slots are of all heads
    put = lambda x, new: write_rows(x, at, row(new), rows == 1)
    write = lambda x, new: written(put, x, new, pos, slots)
    return with_rows(kv, write, lambda x: write_rows(x, at, 0, rows == 1), k, v, pos)


def dead_slots(held: Int[Array, "B K S"], pos: Int[Array, "B T"]) -> Int[Array, "B K T"]:
    """A different dead slot for each row but padding; S where there is none.

    One row, that of a decode step, finds in one pass over `held` whether it has a slot and which.
    """
    S = held.shape[2]
    if pos.shape[1] == 1:
        slot = jnp.where(held == EMPTY, lax.broadcasted_iota(jnp.int32, held.shape, 2), S)
        return slot.min(-1, keepdims=True)
    free = held == EMPTY
    order = jnp.argsort(~free, axis=-1, stable=True)
    nth, real = jnp.cumsum(pos != EMPTY, axis=-1)[:, None] - 1, (pos != EMPTY)[:, None]
    fits = real & (nth < free.sum(-1, keepdims=True))
    return jnp.where(fits, jnp.take_along_axis(order, jnp.clip(nth, 0, S - 1), -1), S)


def empty(info: LayerInfo, policy: Policy, batch: int, dtype: Dtype, slots: int = 0) -> Layer:
    """A layer without tokens, stored as its policy wants it.

    Args:
      info: the layer's shape.
      policy: the layer's policy.
      batch: sequences.
      dtype: of keys and values.
      slots: dead slots of each head to begin with.

    Raises:
      TypeError: the policy's memory has leaves that are neither `PerSlot` nor `PerHead`.
    """
    spec, K, layout = lambda x: isinstance(x, PerSlot | PerHead), info.num_kv_heads, policy.layout
    leaves, tree = jax.tree.flatten(policy.memory(info), is_leaf=spec)
    if wrong := [x for x in leaves if not spec(x)]:
        raise TypeError(
            f"memory is a tree of PerSlot and PerHead, but has a {type(wrong[0]).__name__}: list shapes only"
        )
    own = lambda x: jnp.full((batch, K, *x.shape), x.fill, x.dtype)
    one = lambda x: own(x) if isinstance(x, PerHead) else jnp.zeros((batch, K, slots, *x.shape), x.dtype)
    arrays, per_head = tree.unflatten(map(one, leaves)), tuple(isinstance(x, PerHead) for x in leaves)
    zeros = jnp.zeros((batch, K, slots, info.head_dim), dtype)
    values = zeros[..., :0] if info.latent else zeros
    weight = jnp.zeros(zeros.shape[:3], accumulator(dtype)) if "log_weight" in policy.writes else None
    where = ("rank", 0) if layout.pool and layout.positions == "shifted" else (layout.positions, layout.sinks)
    how = Keeps(*where, policy.writes, per_head, info.latent, layout.codec)
    pos, fault = jnp.full(zeros.shape[:3], EMPTY, jnp.int32), jnp.zeros((batch, K), bool)
    return Layer(zeros, values, pos, fault, arrays, weight, how=how)
