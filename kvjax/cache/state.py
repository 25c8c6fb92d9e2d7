"""The KV cache as an immutable value: every slot knows its position, and dead slots are marked, not moved.

Letters: B batch, T new tokens, S slots, N query heads, K kv heads, H head_dim, L layers.

A live slot of a layer holds `(k, v, pos)`; `pos == EMPTY` marks a dead one. Masks, rotary embeddings, recency windows,
sinks and padding all come from `pos`, so the order of slots never matters and layers and heads may hold different
tokens. Eviction marks slots dead (`evict`); storage shrinks in one separate place (`compact`); decoding writes a new
token into a dead slot (`insert`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Shaped

from kvjax.cache import mesh
from kvjax.pallas_kernels import Attention, Columns
from kvjax.pallas_kernels.columns import accumulator
from kvjax.pallas_kernels.pytree import described, is_known, pytree, static
from kvjax.pallas_kernels.values import (
    MOST_TOKENS,
    as_annotated,
    as_numbers,
    as_numpy,
    check_array,
    checked,
    is_array,
    optional,
    whole,
)

EMPTY: Final = -1

_ROUNDING = 1e-5  # what sums of gates may be beyond 1

Positions = Literal["original", "compact", "rerotate"]

KeyPositions = Literal["original", "compact", "rerotate", "sliding"]
"""How a layer stores keys. "sliding" is "compact" where a policy keeps the first tokens and the last ones alone."""

Rotate = Callable[[Float[Array, "B N T H"], Int[Array, "B #N T"]], Float[Array, "B N T H"]]
"""Applies a model's rotary embedding at given positions."""

Slopes = tuple[float, ...]
"""ALiBi's slope of every query head (arXiv 2108.12409): how much a key's logits fall with every token behind it."""


@pytree
class PerHead:
    """A leaf of a policy's memory that belongs to a kv head instead of a slot; eviction leaves it alone."""

    value: Shaped[Array, "B K *rest"]


@pytree
class Chosen:
    """The slots that a decode row reads, by number, so that attention touches no others.

    Attributes:
      slots: R slots of every head in any order, each once; -1 in places that name none.
    """

    slots: Int[Array, "B K R"]

    def mask(self, num_slots: int) -> Bool[Array, "B K S"]:
        """True at the chosen of `num_slots` slots."""
        return mesh.by_head(_chosen, self.slots, num_slots)

    def among(self, shown: Bool[Array, "B K S"]) -> "Chosen":
        """Those of the chosen slots that a mask shows."""
        return Chosen(mesh.by_head(_shown, (self.slots, shown)))


def _chosen(slots: Int[Array, "B K R"], num_slots: int) -> Bool[Array, "B K S"]:
    return _spread((jnp.ones(slots.shape, bool), slots), num_slots)


def _shown(own: tuple[Int[Array, "B K R"], Bool[Array, "B K S"]]) -> Int[Array, "B K R"]:
    slots, shown = own
    return jnp.where(_along(shown, slots), slots, -1)


def _along(x: Shaped[Array, "B K S *rest"], slots: Int[Array, "B K R"]) -> Shaped[Array, "B K R *rest"]:
    """What stands in slots, of the first one where they name none."""
    at = jnp.maximum(slots, 0).reshape(*slots.shape, *(1,) * (x.ndim - 3))
    return jnp.take_along_axis(x, at, axis=2, mode="promise_in_bounds")


def _gathered(
    own: tuple[Int[Array, "B K R"], Array, Array, Int[Array, "B K S"], Float[Array, "B N S"] | None],
) -> tuple[Array, Array, Int[Array, "B K R"], Float[Array, "B N R"] | None]:
    """Keys, values, positions and bias of chosen slots; no token stands in places that name none."""
    slots, keys, values, pos, bias = own
    pos = jnp.where(slots < 0, EMPTY, _along(pos, slots))
    if bias is not None:
        bias = _along(bias, jnp.repeat(slots, bias.shape[1] // slots.shape[1], axis=1))
    return _along(keys, slots), _along(values, slots), pos, bias


def _spread(
    own: tuple[Shaped[Array, "B _ *row R"], Int[Array, "B K R"]], num_slots: int
) -> Shaped[Array, "B _ *row S"]:
    """Numbers of chosen slots at the places of all slots, 0 at the others."""
    x, slots = own
    at = jnp.repeat(jnp.where(slots < 0, num_slots, slots), x.shape[1] // slots.shape[1], axis=1)
    at = jnp.broadcast_to(at.reshape(*at.shape[:2], *(1,) * (x.ndim - 3), at.shape[-1]), x.shape)
    nothing = jnp.zeros((*x.shape[:-1], num_slots), x.dtype)
    return jnp.put_along_axis(nothing, at, x, axis=-1, inplace=False, mode="drop")


@pytree
class LayerKV:
    """One layer's cache.

    Attributes:
      k: keys, C = H channels unless some were dropped. Rotated at `pos`, at `rotated` where that is given, or not
        rotated at all when `positions` is "compact".
      v: values.
      pos: absolute position of the token in the slot, or EMPTY.
      memory: the policy's numbers: arrays "B K S ..." with one entry a slot, which start from zero whenever a slot is
        filled, and `PerHead` arrays.
      rank: None for "original". Otherwise the slot's rank by position among the live slots of its head: where its key
        is rotated at every use ("compact": StreamingLLM, arXiv 2309.17453), or once after every eviction ("rerotate").
        "sliding" is "compact" of keys that are stored rotated: see `settled`.
      channels: the key channels that are stored, increasing, where keys have lost some (ThinK, arXiv 2407.21018).
      rotated: for "rerotate" and "sliding", the rank at which the stored key is rotated; `attend` brings it up to date,
        for "sliding" when it must.
      gate: how much of every slot is kept, in [0, 1], where a policy is relaxed (`kvjax.relax`): attention reads a slot
        with its gate as weight. None where slots are live or dead and nothing between.
      positions: how keys are rotated.
    """

    k: Float[Array, "B K S C"]
    v: Float[Array, "B K S H"]
    pos: Int[Array, "B K S"]
    memory: PyTree[Any] = ()
    rank: Int[Array, "B K S"] | None = None
    rotated: Int[Array, "B K S"] | None = None
    channels: Int[Array, "B K C"] | None = None
    gate: Float[Array, "B K S"] | None = None
    positions: KeyPositions = static(default="original")

    @property
    def live(self) -> Bool[Array, "B K S"]:
        """True where a slot holds a token."""
        return self.pos != EMPTY

    @property
    def num_live(self) -> Int[Array, "B K"]:
        """Live slots of every kv head."""
        return self.live.sum(-1, dtype=jnp.int32)

    @property
    def num_slots(self) -> int:
        """Slots allocated for every kv head (static)."""
        return self.pos.shape[-1]

    @property
    def num_kv_heads(self) -> int:
        """K (static)."""
        return self.pos.shape[1]

    @property
    def head_pos(self) -> Int[Array, "B K S"]:
        """The positions that every head holds, EMPTY elsewhere."""
        return self.pos

    # What every storage answers; `kvjax.cache.pool.PooledKV` is the other one.

    def view(self) -> "LayerKV":
        """The layer as policies know it: itself."""
        return self

    def apply(self, change: "Callable[[LayerKV], LayerKV]") -> "LayerKV":
        """What a function of the view makes of the layer."""
        return change(self)

    def next_ranks(self, pos: Int[Array, "B T"]) -> Int[Array, "B K T"]:
        """Ranks of T new tokens behind everything live; EMPTY for padding."""
        return next_ranks(self, jnp.broadcast_to(pos[:, None], (*self.pos.shape[:2], pos.shape[1])))

    def turned(self, rotate: Rotate) -> "LayerKV":
        """Keys rotated at their present ranks, where they are stored rotated at earlier ones."""
        if self.rank is None or self.rotated is None or not self.num_slots:
            return self

        def turn(own: tuple[LayerKV, Array, Array]) -> LayerKV:
            here, rank, rotated = own
            moved = here._moved(rank, rotated)
            return here._turned(rotate, moved, rotated, (moved != 0).any())

        return mesh.by_head(turn, (self, self.rank, self.rotated))

    def _moved(self, rank: Int[Array, "B K S"], rotated: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
        """By how many ranks every live slot has moved since its key was rotated."""
        return jnp.where(self.live, rank - rotated, 0)

    def _turned(
        self, rotate: Rotate, moved: Int[Array, "B K S"], rotated: Int[Array, "B K S"], due: Bool[Array, ""]
    ) -> "LayerKV":
        """Keys turned by as many ranks as they have moved, if that is due."""
        k = lax.cond(due, lambda: rotate(self.k, moved).astype(self.k.dtype), lambda: self.k)
        return dataclasses.replace(self, k=k, rotated=rotated + jnp.where(due, moved, 0))

    def settled(self, rotate: Rotate, first: int) -> tuple["LayerKV", Int[Array, "B K 1"]]:
        """For "sliding": a layer all of whose keys lag behind their ranks alike, but the first tokens'; and how far.

        A logit depends on the difference of two ranks, so that keys which moved up together are met where they were by
        a query that is turned back as far. Keys are turned where anything else happened, as when a user evicts, and
        when they lag behind by as many ranks as there are slots. So angles stay as small as those of ranks, whatever
        the length of the text, and a key is turned again twice at most before it leaves.

        Args:
          rotate: see `attend`.
          first: tokens at the beginning of the text that may stay where they are.

        Returns:
          The layer, and by how many ranks every key from `first` on has moved since it was rotated, at most 0.
        """
        if self.rank is None or self.rotated is None:
            return self, jnp.zeros((*self.pos.shape[:2], 1), jnp.int32)
        moved, most = self._moved(self.rank, self.rotated), jnp.iinfo(jnp.int32).max
        later = self.pos >= first
        astray = ~later & (moved != 0)
        low = jnp.where(later, moved, jnp.where(astray, -most, most)).min(-1, keepdims=True)
        high = jnp.where(later, moved, jnp.where(astray, 1, -most)).max(-1, keepdims=True)
        due = ((high > low) | ((low < -self.num_slots) & (low > -most))).any()
        return self._turned(rotate, moved, self.rotated, due), jnp.where(due | (low == most), 0, low)

    def first_slots(self, first: int) -> Int[Array, "B K first"]:
        """The slots of the first tokens, S for those that are not live."""
        B, K, S = self.pos.shape
        b, h = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
        place = jnp.where(self.live & (self.pos < first), self.pos, first)
        return jnp.full((B, K, first), S, jnp.int32).at[b, h, place].set(_indices(self.pos), mode="drop")

    def insert(
        self,
        k: Float[Array, "B K 1 C"],
        v: Float[Array, "B K 1 H"],
        pos: Int[Array, "B 1"],
        lag: Int[Array, "B K 1"] | None = None,
    ) -> "LayerKV":
        """See `insert`."""
        return insert(self, k, v, pos, lag)

    def keys(self, rotate: Rotate) -> Float[Array, "B K S H"]:
        """Keys as queries meet them: rotated, and as wide as values; channels that were dropped are zeros."""
        if self.positions == "compact":
            rank = jnp.zeros_like(self.pos) if self.rank is None else jnp.maximum(self.rank, 0)
            return rotated_below(rotate, self.k, rank, self.num_slots)
        return widened(self.k, self.v.shape[-1])

    def bias(self, slopes: Slopes) -> Float[Array, "B N S"]:
        """What slopes add to the logits of every slot: see `linear_bias`. Its place is its position or its rank."""
        return linear_bias(slopes, self.pos if self.rank is None else self.rank, dtype=self.v.dtype)

    def attend(
        self,
        q: Float[Array, "B N T H"],
        keys: Float[Array, "B K S H"],
        q_pos: Int[Array, "B T"],
        columns: Sequence[Columns],
        *,
        visible: Bool[Array, "B K S"] | Chosen | None = None,
        **options: Any,
    ) -> Attention:
        """Attention over the slots, or over those of them that are `visible`; `options` as in `pallas_kernels`.

        Slots that are named are gathered, and no others are read; statistics of the others are 0.
        """
        if isinstance(visible, Chosen):
            options = dict(options)
            own = visible.slots, keys, self.v, self.pos, options.pop("bias", None)
            k, v, pos, bias = mesh.by_head(_gathered, own)
            found = mesh.attention(q, k, v, q_pos, pos, columns=columns, bias=bias, **options)
            everywhere = (mesh.by_head(_spread, (x, visible.slots), self.num_slots) for x in found.columns)
            return dataclasses.replace(found, columns=tuple(everywhere))
        read = self.pos if visible is None else jnp.where(visible, self.pos, EMPTY)
        return mesh.attention(q, keys, self.v, q_pos, read, columns=columns, **options)


@pytree
class KVState:
    """The cache of a whole model, and where generation stands.

    Attributes:
      layers: one `LayerKV` a layer, or one `PooledKV` (`kvjax.cache.pool`); capacities may differ.
      length: tokens of every sequence seen so far, evicted ones included; the next token's position.
      prompt_length: tokens of every sequence's prompt. Budgets given as a ratio are ratios of this.
      step: decode steps of the batch; a sequence that slept has taken fewer, `length - prompt_length`.
      keys: one PRNG key a sequence. Every draw of a policy derives from (key, layer, head, step, position), so a row
        of a batch draws what it would draw alone.
      plan: the static sizes (`kvjax.CachePlan`).
      sizes: for every layer, the numbers of tokens that its rules have instead of the planned ones
        (`CachePlan.sizes`); None for those.
    """

    layers: tuple[Any, ...]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    step: Int[Array, ""]
    keys: Key[Array, "B"]
    plan: Any = static()
    sizes: tuple[Any, ...] | None = None

    def __repr__(self) -> str:
        sizes = [f"length={described(self.length)}", f"prompt_length={described(self.prompt_length)}"]
        layers = self.layers if isinstance(self.layers, tuple) else ()
        if layers and all(isinstance(getattr(kv, "pos", None), jax.Array) for kv in layers):
            slots = sorted({kv.pos.shape[-1] for kv in layers})
            sizes.append(f"{len(layers)} layers of {' or '.join(map(str, slots))} slots")
            if all(is_known(kv.pos) for kv in layers):
                live = [np.asarray(kv.num_live) for kv in self.layers]
                sizes.append(f"{min(x.min() for x in live)} to {max(x.max() for x in live)} live a kv head")
            sizes.append(f"{self.kv_bytes:,} bytes of keys and values")
        return f"KVState({', '.join(sizes)}, policy={getattr(self.plan, 'policy', None)!r})"

    @property
    def num_live(self) -> Int[Array, "B L K"]:
        """Live slots of every sequence, layer and kv head."""
        return jnp.stack([layer.num_live for layer in self.layers], axis=1)

    @property
    def num_slots(self) -> int:
        """Slots allocated for one sequence, summed over layers and kv heads (static)."""
        return sum(math.prod(layer.pos.shape[1:]) for layer in self.layers)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values in all layers, dead slots included (static)."""
        return sum(x.size * x.dtype.itemsize for layer in self.layers for x in (layer.k, layer.v))


def rotated_below(
    rotate: Rotate, x: Float[Array, "B N S H"], pos: Int[Array, "B #N S"], bound: int
) -> Float[Array, "B N S H"]:
    """`rotate(x, pos)` for positions below `bound`: by a table of them where the model has one (`Rope.tabled`)."""
    tabled = getattr(rotate, "tabled", None)
    return rotate(x, pos) if tabled is None else tabled(x, pos, bound)


def linear_bias(
    slopes: Slopes, places: Int[Array, "B K S"], *, dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "B N S"]:
    """ALiBi's bias of keys: minus the slope of a query head times how many places a key lies behind the newest.

    A row that is not the newest is nearer to all keys by the same number of places, and a softmax does not see what all
    keys of a row have in common. So one number a key serves all rows, exactly but for rounding: where rows are read
    together, that of the distance to the newest of them, as in transformers.

    Args:
      slopes: one for each query head.
      places: where keys stand, negative for a dead slot.
      dtype: of keys and values; the bias has that of their logits.
    """
    B, K, S = places.shape
    behind = (places - places.max(-1, keepdims=True)).astype(accumulator(dtype))
    slope = jnp.asarray(slopes, behind.dtype).reshape(1, K, len(slopes) // K, 1)
    return (slope * behind[:, :, None]).reshape(B, len(slopes), S)


def widened(x: Float[Array, "*heads C"], width: int) -> Float[Array, "*heads width"]:
    """Vectors of the given width: zeros behind the channels that are left, which changes no product of two."""
    lost = width - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, lost)]) if lost else x


def map_slots(fn, *memories: PyTree[Any]) -> PyTree[Any]:
    """Applies `fn` to the per-slot leaves of policy memories and keeps the first one's `PerHead` leaves."""
    per_head = lambda x: isinstance(x, PerHead)
    return jax.tree.map(lambda x, *rest: x if per_head(x) else fn(x, *rest), *memories, is_leaf=per_head)


@as_annotated
def take_rows(state: KVState, rows: Array | np.ndarray | Sequence[int]) -> KVState:
    """The sequences `rows` "R" of a state, in that order; one may be taken several times, and each copy keeps its key.

    Under `jax.jit`, values are NaN, and so are logits, of a sequence that the state does not have.

    Raises:
      ValueError: no state, no whole numbers, or sequences that the state does not have.
    """
    B = len(state.length)
    if not isinstance(rows, jax.core.Tracer):
        known = as_numpy("rows", rows)
        if known.ndim != 1 or known.dtype.kind not in "iu" or not known.size or known.min() < 0 or known.max() >= B:
            raise ValueError(f"rows={known.tolist()}: must be whole numbers, at least one, from 0 to {B - 1}")
        rows = jnp.asarray(known)
    take = lambda x: x[rows]
    names = ("layers", "length", "prompt_length", "keys", "sizes")
    taken = dataclasses.replace(state, **jax.tree.map(take, {name: getattr(state, name) for name in names}))
    if not isinstance(rows, jax.core.Tracer):
        return taken
    there = lambda x: ((rows >= 0) & (rows < B)).reshape(-1, *(1,) * (x.ndim - 1))
    marked = (dataclasses.replace(kv, v=jnp.where(there(kv.v), kv.v, jnp.nan)) for kv in taken.layers)
    return dataclasses.replace(taken, layers=tuple(marked))


def check_shares(gates: Array) -> None:
    """Raises ValueError for gates outside of [0, 1], where they are known."""
    if not isinstance(gates, jax.core.Tracer) and gates.size:
        low, high = float(gates.min()), float(gates.max())
        if not (low >= -_ROUNDING and high <= 1 + _ROUNDING):
            raise ValueError(f"gates lie between {low} and {high}, but a slot is kept by a share in [0, 1]")


@as_annotated
def with_gates(state: KVState, gates: Float[Array, "B L K S"] | Sequence[Any]) -> KVState:
    """A state whose slots have these gates, whatever its policy: what a study computed from scores of its own.

    Raises:
      ValueError: gates of other layers, heads or slots than the state has, or outside of [0, 1], where they are known;
        a state that is stored in pools.
    """
    if not all(isinstance(kv, LayerKV) for kv in state.layers):
        raise ValueError("slots of a pool have no gates; make the state's plan with storage='dense'")
    gates = jnp.asarray(as_numbers("gates", gates))
    has = [(kv.pos.shape[0], len(state.layers), *kv.pos.shape[1:]) for kv in state.layers]
    if any(gates.shape != shape for shape in has):
        raise ValueError(f"gates have the shape {gates.shape}, but the state's slots {has[0]}; give one a slot")
    check_shares(gates)
    layers = tuple(dataclasses.replace(kv, gate=gates[:, i]) for i, kv in enumerate(state.layers))
    return dataclasses.replace(state, layers=layers)


def _indices(pos: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    return lax.broadcasted_iota(jnp.int32, pos.shape, 2)


def append(kv: LayerKV, k: Float[Array, "B K T C"], v: Float[Array, "B K T H"], pos: Int[Array, "B T"]) -> LayerKV:
    """Adds T slots at the end. A token whose position is EMPTY (padding) makes a dead slot."""
    B, K, T, _ = k.shape
    pos = jnp.broadcast_to(pos[:, None], (B, K, T))
    new_rank = None if kv.rank is None else next_ranks(kv, pos)
    join = lambda old, new: None if old is None else jnp.concatenate([old, new], axis=2)
    return dataclasses.replace(
        kv,
        k=jnp.concatenate([kv.k, k.astype(kv.k.dtype)], axis=2),
        v=jnp.concatenate([kv.v, v.astype(kv.v.dtype)], axis=2),
        pos=jnp.concatenate([kv.pos, pos], axis=2),
        memory=map_slots(lambda m: jnp.pad(m, [(0, 0), (0, 0), (0, T)] + [(0, 0)] * (m.ndim - 3)), kv.memory),
        rank=join(kv.rank, new_rank),
        rotated=join(kv.rotated, new_rank),
        gate=None if kv.gate is None else join(kv.gate, jnp.ones((B, K, T), kv.gate.dtype)),
    )


def insert(
    kv: LayerKV,
    k: Float[Array, "B K 1 C"],
    v: Float[Array, "B K 1 H"],
    pos: Int[Array, "B 1"],
    lag: Int[Array, "B K 1"] | None = None,
) -> LayerKV:
    """Writes one token into a dead slot of every head, in place under `jit` with donated or scanned state.

    Its key is rotated at its rank, less the `lag` of a window that it joins (`LayerKV.settled`).

    A token whose position is EMPTY changes nothing that is live. A head without a dead slot has been driven past its
    plan: instead of overwriting a token silently, one of the head's values becomes NaN, and with it the logits.
    """
    return mesh.by_head(_insert, (kv, k, v, lag), pos)


def _insert(own: tuple[LayerKV, Array, Array, Array | None], pos: Int[Array, "B 1"]) -> LayerKV:
    kv, k, v, lag = own
    B, K, S = kv.pos.shape
    slot = jnp.where(kv.live, S, _indices(kv.pos)).min(-1)  # first dead slot, S if there is none
    overflow = (slot == S) & (pos != EMPTY)
    b, h = jnp.arange(B)[:, None], jnp.arange(K)[None]
    write = lambda x, new: x.at[b, h, slot].set(new.astype(x.dtype), mode="drop", unique_indices=True)
    kv = dataclasses.replace(kv, v=kv.v.at[b, h, jnp.where(overflow, 0, S)].set(jnp.nan, mode="drop"))
    pos = jnp.broadcast_to(pos[:, None], (B, K, 1))
    new_rank = None if kv.rank is None else next_ranks(kv, pos)[:, :, 0]
    place = new_rank if new_rank is None or lag is None else new_rank - lag[..., 0]
    return dataclasses.replace(
        kv,
        k=write(kv.k, k[:, :, 0]),
        v=write(kv.v, v[:, :, 0]),
        pos=write(kv.pos, pos[:, :, 0]),
        memory=map_slots(lambda m: write(m, jnp.zeros((B, K, *m.shape[3:]), m.dtype)), kv.memory),
        rank=None if kv.rank is None else write(kv.rank, new_rank),
        rotated=None if kv.rotated is None else write(kv.rotated, place),
        gate=None if kv.gate is None else write(kv.gate, jnp.ones((B, K), kv.gate.dtype)),
    )


def next_ranks(kv: LayerKV, pos: Int[Array, "B K T"]) -> Int[Array, "B K T"]:
    """Ranks of T new tokens behind everything live; EMPTY for padding."""
    live = pos != EMPTY
    return jnp.where(live, kv.num_live[..., None] + jnp.cumsum(live, axis=-1, dtype=jnp.int32) - 1, EMPTY)


@jax.jit
def position_order(pos: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    """Slot indices by increasing position, dead slots first.

    Positions that already increase from slot to slot, as after prefill, only need the dead slots moved out; on CPU that
    is ten times cheaper than the sort that the general case takes.
    """
    return mesh.by_head(_position_order, pos)


def _position_order(pos: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    live = pos != EMPTY
    slots = _indices(pos)

    def partition(pos):
        rank = jnp.cumsum(live, axis=-1, dtype=jnp.int32)
        num_dead = pos.shape[-1] - rank[..., -1:]
        place = jnp.where(live, num_dead + rank - 1, slots - rank)
        return jnp.put_along_axis(jnp.zeros_like(slots), place, slots, axis=-1, inplace=False)

    seen = lax.cummax(pos, axis=2)
    ordered = (~live[..., 1:] | (pos[..., 1:] > seen[..., :-1])).all()
    return lax.cond(ordered, partition, lambda pos: jnp.argsort(pos, axis=-1).astype(jnp.int32), pos)


def evict(kv: LayerKV, keep: Bool[Array, "B K S"], *, most: int | None = None) -> LayerKV:
    """Marks every slot outside `keep` dead. Nothing moves.

    Args:
      kv: the layer.
      keep: which slots stay.
      most: of a head, how many live slots `keep` leaves out at most, where that is known: with one, ranks take less.

    Raises:
      ValueError: what is no layer, or no mask of its slots; no number, or one that `keep` is known to exceed.
    """
    _check_layer(kv)
    if hasattr(keep, "dtype") and not is_array(keep):
        check_array("keep", keep, "batch", "kv heads", "slots", kind=np.bool_)
    most = checked(optional(whole(0)), "most", most)
    found = getattr(keep, "dtype", type(keep).__name__), getattr(keep, "shape", ())
    if found != (bool, kv.pos.shape):
        raise ValueError(
            f"keep must be a mask of the layer's slots, booleans of shape {kv.pos.shape}; got {found[0]} of shape "
            f"{found[1]}"
        )
    if (
        most is not None
        and is_known(kv.pos)
        and is_known(keep)
        and (gone := int((kv.live & ~keep).sum(-1).max())) > most
    ):
        raise ValueError(f"keep leaves out {gone} live slots of a head, but most={most}; give a larger one, or none")
    return _evict(kv, keep, most == 1)


def _check_layer(kv: Any) -> None:
    if not isinstance(kv, LayerKV):
        raise ValueError(f"kv is a {type(kv).__name__}, not a LayerKV, one layer of a state (state.layers[0])")


@functools.partial(jax.jit, static_argnums=2)
def _evict(kv: LayerKV, keep: Bool[Array, "B K S"], one: bool) -> LayerKV:
    return mesh.by_head(lambda own: _without(own[0], own[1], one), (kv, keep))


def _without(kv: LayerKV, keep: Bool[Array, "B K S"], one: bool) -> LayerKV:
    pos = jnp.where(keep, kv.pos, EMPTY)
    if kv.rank is None:
        return dataclasses.replace(kv, pos=pos)
    gone = kv.live & ~keep
    # One eviction a head is the case of decoding: everything behind it moves up by one. Otherwise rank anew.
    first_gone = jnp.where(gone, kv.rank, jnp.iinfo(jnp.int32).max).min(-1, keepdims=True)
    moved_up = lambda: kv.rank - (kv.rank > first_gone).astype(jnp.int32)
    rank = moved_up() if one else lax.cond((gone.sum(-1) <= 1).all(), moved_up, lambda: ranks(pos))
    return dataclasses.replace(kv, pos=pos, rank=jnp.where(pos == EMPTY, EMPTY, rank))


def ranks(pos: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    """Rank by position among the live slots of a head; dead slots get some number below zero."""

    def ranked(pos: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
        order = position_order(pos)
        num_dead = (pos == EMPTY).sum(-1, keepdims=True, dtype=jnp.int32)
        return jnp.put_along_axis(jnp.zeros_like(pos), order, _indices(pos) - num_dead, axis=-1, inplace=False)

    return mesh.by_head(ranked, pos)


def compact(kv: LayerKV, capacity: int) -> LayerKV:
    """Moves the live slots, in order of position, into a cache of `capacity` slots a head; the rest are dead.

    Frees real memory: the result's arrays have `capacity` slots. A head with more live tokens than that was given a
    plan for other prompts: instead of losing its oldest tokens silently, its values become NaN.

    Raises:
      ValueError: what is no layer, or no number of slots.
    """
    _check_layer(kv)
    return _compact(kv, checked(whole(1, MOST_TOKENS), "capacity", capacity))


@functools.partial(jax.jit, static_argnames="capacity")
def _compact(kv: LayerKV, capacity: int) -> LayerKV:
    return mesh.by_head(functools.partial(_moved_together, capacity=capacity), kv)


def _moved_together(kv: LayerKV, capacity: int) -> LayerKV:
    kept = min(capacity, kv.num_slots)
    order = position_order(kv.pos)[..., kv.num_slots - kept :]

    def gather(x):
        index = order.reshape(order.shape + (1,) * (x.ndim - 3))
        x = jnp.take_along_axis(x, index, axis=2)
        return jnp.pad(x, [(0, 0), (0, 0), (0, capacity - kept)] + [(0, 0)] * (x.ndim - 3))

    live = gather(kv.live)
    clean = lambda x: jnp.where(live.reshape(live.shape + (1,) * (x.ndim - 3)), gather(x), jnp.zeros((), x.dtype))
    return dataclasses.replace(
        kv,
        k=clean(kv.k),
        v=jnp.where((kv.num_live > capacity)[..., None, None], jnp.asarray(jnp.nan, kv.v.dtype), clean(kv.v)),
        pos=jnp.where(live, gather(kv.pos), EMPTY),
        memory=map_slots(clean, kv.memory),
        rank=None if kv.rank is None else jnp.where(live, gather(kv.rank), EMPTY),
        rotated=None if kv.rotated is None else jnp.where(live, gather(kv.rotated), EMPTY),
        gate=None if kv.gate is None else clean(kv.gate),
    )
