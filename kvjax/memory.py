"""Bytes that a planned run takes, before it is run.

The state's are those of the arrays that it will have, whatever the policy: layers are made in the abstract, as drivers
make them (`jax.eval_shape`). What reading the prompt takes beside it is an estimate, whose terms are named.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.cache.context import Context
from kvjax.cache.pool import PooledKV, to_pool
from kvjax.cache.state import KeyPositions, LayerKV, append, compact
from kvjax.pallas_kernels import attention
from kvjax.pallas_kernels.xla import head_block_size
from kvjax.policy import LayerPolicy, Layout, empty_layer
from kvjax.scoring.replay import Replay
from kvjax.scoring.stats import Moment

_UNITS = "B", "KiB", "MiB", "GiB"


@dataclasses.dataclass(frozen=True)
class Widths:
    """What of a model its memory depends on, beside what policies know of its layers.

    Attributes:
      num_kv_heads, vocab_size: K and V.
      embed_dim, mlp_dim: of the residual stream and the feed-forward network; 0 where the config has none.
      dtype: of keys, values and activations.
    """

    num_kv_heads: int
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """Bytes of a layer's cache after the prompt, dead slots included.

    Attributes:
      keys, values: what attention reads.
      positions: of every slot.
      ranks: where keys are rotated by rank: the ranks, and those that stored keys are rotated at.
      policy: what the policy carries: accumulated scores, shares of heads.
      rest: gates, the channels that thin keys have left, the ends of heads in a pool.
    """

    keys: int
    values: int
    positions: int
    ranks: int
    policy: int
    rest: int

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class PrefillMemory:
    """Bytes that reading the prompt takes beside parameters and state, about.

    Attention and the feed-forward network of a layer follow one another, so that the larger counts.

    Attributes:
      cache: all keys and values of one layer, with their positions and what the policy carries for them; of all
        layers with what is measured in them where one decision is made for all when the model has run. Where the
        prompt is read again before anything is evicted, those of all layers and what was found of them, and one
        layer's once more, in front of the rows that read.
      attention: the residual stream as it is and normalised, queries before and after rotation, what is measured, and
        logits and probabilities of a block of rows, as XLA computes them.
      feed_forward: the residual stream as it is and normalised, and three arrays as wide as the network: a gate, what
        it lets through, and their product.
      logits: those of the last token.
    """

    cache: int
    attention: int
    feed_forward: int
    logits: int

    @property
    def total(self) -> int:
        """What is there at once, at most."""
        return self.cache + max(self.attention, self.feed_forward) + self.logits


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a planned run (`kvjax.CachePlan.memory`). Printed as text, it is a table.

    Attributes:
      run: what was planned: sequences, tokens, dtype.
      layers: of every layer's cache.
      sequences: lengths and keys of the draws.
      prefill: what reading the prompt takes beside parameters and state, an estimate.
      full: those of the state that holds every token, prompt and new ones.
    """

    run: str
    layers: tuple[LayerMemory, ...]
    sequences: int
    prefill: PrefillMemory
    full: int

    def _sum(self, *names: str) -> int:
        return sum(getattr(layer, name) for layer in self.layers for name in names)

    @property
    def kv(self) -> int:
        """Keys and values of all layers: `KVState.kv_bytes`."""
        return self._sum("keys", "values")

    @property
    def state(self) -> int:
        """Everything that is carried from one decode step to the next: all arrays of a `KVState`."""
        return self.sequences + sum(layer.total for layer in self.layers)

    @property
    def peak(self) -> int:
        """The state and what reading the prompt takes beside it, an estimate; parameters are not among it."""
        return self.state + self.prefill.total

    def __str__(self) -> str:
        most = lambda *names: max(sum(getattr(layer, name) for name in names) for layer in self.layers)
        rows = [(self.run, "largest layer", "all layers")]
        kinds = {"keys and values": ("keys", "values"), **{n: (n,) for n in ("positions", "ranks", "policy", "rest")}}
        rows += [(name, shown(most(*of)), shown(self._sum(*of))) for name, of in kinds.items() if self._sum(*of)]
        rows.append(("lengths and keys of draws", "", shown(self.sequences)))
        rows.append(("state", "", f"{shown(self.state)}, {self.state / self.full:.1%} of {shown(self.full)} in full"))
        parts = dataclasses.asdict(self.prefill)
        rows += [(f"prefill: {name.replace('_', '-')}", shown(size), "") for name, size in parts.items()]
        rows.append(("peak while reading, about", "", shown(self.peak)))
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{a:{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in rows)


def shown(size: int) -> str:
    """A number of bytes in the unit that suits it, up to GiB."""
    power = min((max(size, 1).bit_length() - 1) // 10, 3)
    x = size / 1024**power
    return f"{x:.0f} {_UNITS[power]}" if power == 0 or x >= 99.95 else f"{x:.3g} {_UNITS[power]}"


def predict(
    layers: Sequence[LayerPolicy],
    capacities: Sequence[int],
    positions: Sequence[KeyPositions],
    layouts: Sequence[Layout],
    widths: Widths,
    *,
    batch: int,
    dtype: jax.typing.DTypeLike,
    block: int | None,
    together: bool,
) -> Memory:
    """See `kvjax.CachePlan.memory`, whose arguments are checked there."""
    dtype, site = jnp.dtype(dtype), layers[0].site
    num_slots = site.prompt_len + site.max_new_tokens
    stored = lambda policy, capacity, place, layout: _after_prompt(policy, capacity, place, layout, batch, dtype)
    each = zip(layers, capacities, positions, layouts, strict=True)
    kept = [jax.eval_shape(functools.partial(stored, *here)) for here in each]
    sequences = _bytes(jax.eval_shape(lambda: _counters(batch)))
    full = batch * widths.num_kv_heads * num_slots * (2 * site.head_dim * dtype.itemsize + 4)
    prefill = [_reading(*here, widths, batch, dtype, block) for here in zip(layers, capacities, positions, strict=True)]
    largest = max(prefill, key=lambda found: found[0].total)[0]
    if together:
        largest = dataclasses.replace(largest, cache=sum(found.cache + measured for found, measured in prefill))
    again = [
        _reading_again(policy, place, replay, widths, batch, dtype)
        for policy, place in zip(layers, positions, strict=True)
        for replay in policy.spec.replays
    ]
    if again:  # before any of them is evicted from
        read = sum(found.cache for found, _ in prefill)
        first = dataclasses.replace(largest, cache=max(read, largest.cache))
        found = sum(measured for _, measured in again)
        later = [dataclasses.replace(here, cache=read + found + here.cache) for here, _ in again]
        largest = max(first, *later, key=lambda reading: reading.total)
    return Memory(
        f"{batch} x ({site.prompt_len:,} + {site.max_new_tokens:,}) tokens, {dtype.name}",
        tuple(map(_layer, kept)),
        sequences,
        largest,
        len(layers) * full + sequences,
    )


def _bytes(x: Any) -> int:
    """Those of all arrays in it."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))


def _layer(kv: LayerKV | PooledKV) -> LayerMemory:
    ends = kv.ends if isinstance(kv, PooledKV) else None
    names = [kv.k, kv.v, kv.pos, (kv.rank, kv.rotated), kv.memory, (kv.gate, kv.channels, ends)]
    return LayerMemory(*map(_bytes, names))


def _counters(batch: int) -> tuple[Int[Array, "B"], Int[Array, "B"], Int[Array, ""], Key[Array, "B"]]:
    """What a state has beside its layers."""
    length = jnp.zeros((batch,), jnp.int32)
    return length, length, jnp.int32(0), jax.random.split(jax.random.key(0), batch)


def _moment(policy: LayerPolicy, batch: int) -> Context:
    """The end of the prompt."""
    length, prompt_length, _, keys = _counters(batch)
    return Context(length, prompt_length, keys, site=policy.site, phase="prefill")


def _after_prompt(
    policy: LayerPolicy,
    capacity: int,
    positions: KeyPositions,
    layout: Layout,
    batch: int,
    dtype: jax.typing.DTypeLike,
) -> LayerKV | PooledKV:
    """A layer as it is stored after the prompt."""
    empty = empty_layer(policy, batch, dtype, positions)
    stored = to_pool(empty, capacity) if layout == "pool" else compact(empty, capacity)
    return policy.finish(stored, _moment(policy, batch))


def _reading(
    policy: LayerPolicy,
    capacity: int,
    positions: KeyPositions,
    widths: Widths,
    batch: int,
    dtype: jax.typing.DTypeLike,
    block: int | None,
) -> tuple[PrefillMemory, int]:
    """What it takes to read the prompt, or a block of it, in one layer; and the bytes of what is measured there."""
    site, dtype = policy.site, jnp.dtype(dtype)
    rows = site.prompt_len if block is None else block
    before = 0 if block is None else capacity
    kv, statistics = jax.eval_shape(lambda: _measured(policy, rows, before, positions, batch, dtype, widths.embed_dim))
    return _attending(policy, rows, before + rows, kv, statistics, widths, batch, dtype), _bytes(statistics)


def _reading_again(
    policy: LayerPolicy,
    positions: KeyPositions,
    replay: Replay,
    widths: Widths,
    batch: int,
    dtype: jax.typing.DTypeLike,
) -> tuple[PrefillMemory, int]:
    """What rows take that repeat a chunk of the prompt in one layer; and the bytes of what is found of all chunks."""
    T = policy.site.prompt_len
    rows = replay.rows(T)
    kv, statistics = jax.eval_shape(
        lambda: _measured(policy, rows, T, positions, batch, dtype, widths.embed_dim, again=replay)
    )
    asked = [m for m in policy.spec.prompt if m.again == replay]
    scratch = max(m.scratch(policy.site, batch, rows) for m in asked)
    reading = _attending(policy, rows, T + rows, kv, statistics, widths, batch, dtype, scratch=scratch)
    return reading, 4 * batch * kv.num_kv_heads * T * len(asked)


def _attending(
    policy: LayerPolicy,
    rows: int,
    slots: int,
    kv: LayerKV,
    statistics: tuple[Any, ...],
    widths: Widths,
    batch: int,
    dtype: jax.typing.DTypeLike,
    scratch: int = 0,
) -> PrefillMemory:
    """What so many rows take that read so many slots of a layer and are measured, which needs `scratch` for a while."""
    site, dtype = policy.site, jnp.dtype(dtype)
    heads = site.num_query_heads
    group = heads // site.num_kv_heads
    block_rows, together = head_block_size(batch * site.num_kv_heads, group, rows, slots)
    logits = 2 * 4 * block_rows * together * group * slots
    width = lambda n: batch * rows * (2 * widths.embed_dim + n) * dtype.itemsize
    return PrefillMemory(
        cache=_bytes(kv),
        attention=width(2 * heads * site.head_dim) + _bytes(statistics) + max(logits, scratch),
        feed_forward=width(3 * widths.mlp_dim),
        logits=4 * batch * widths.vocab_size,
    )


def _measured(
    policy: LayerPolicy,
    rows: int,
    before: int,
    positions: KeyPositions,
    batch: int,
    dtype: jax.typing.DTypeLike,
    embed_dim: int,
    again: Replay | None = None,
) -> tuple[LayerKV, tuple[Any, ...]]:
    """A layer with so many new tokens behind what it held, and what is measured of their attention.

    With `again`, they repeat a chunk of the prompt.
    """
    site, ctx = policy.site, _moment(policy, batch)
    pos = jnp.zeros((batch, rows), jnp.int32)
    q: Float[Array, "B N T H"] = jnp.zeros((batch, site.num_query_heads, rows, site.head_dim), dtype)
    kv = empty_layer(policy, batch, dtype, positions)
    kv = compact(kv, before) if before else kv
    new = jnp.zeros((batch, kv.num_kv_heads, rows, site.head_dim), dtype)
    kv = append(kv, new, new, pos)
    chunk = None if again is None else again.span(site.prompt_len, ctx.length, jnp.int32(0))
    ctx = dataclasses.replace(ctx, ids=pos, again=chunk)
    out_proj = jnp.zeros((site.num_query_heads, site.head_dim, max(embed_dim, 1)), dtype)
    hidden = jnp.zeros((batch, rows, max(embed_dim, 1)), dtype)
    moment = Moment(q, q, kv, pos, ctx, lambda x, at: x, out_proj, hidden)
    prompt = policy.spec.prompt
    observed = policy.spec.observe("prefill") if again is None else tuple(m for m in prompt if m.again == again)
    asked = [o.columns(moment) for o in observed]
    columns = tuple(c for c in asked if c is not None)
    found = iter(attention(q, kv.k, kv.v, pos, kv.pos, columns=columns).columns)
    measured = {o: next(found) for o, c in zip(observed, asked, strict=True) if c is not None}
    moment = dataclasses.replace(moment, measured=measured)
    return kv, tuple(measured[o] if o in measured else o.measure(moment) for o in observed)
