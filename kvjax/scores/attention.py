"""Scores by position and by attention. A score is one number a slot, "B K S", and the larger stays."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from kvjax.contract import (
    Amount,
    Count,
    LayerInfo,
    LayerView,
    NonNegative,
    Observation,
    Odd,
    PerSlot,
    Phase,
    Prompts,
    Proportion,
    Score,
    Size,
    Slots,
    count,
    place,
    resolve,
)
from kvjax.decide.select import best
from kvjax.observe import Reread, Rows
from kvjax.scores.blends import pool_in_order


class Recency(Score):
    """The position: newer tokens rank higher.

    Attributes:
      every: tokens whose position `every` does not divide rank below all others.
    """

    every: Size = 1

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        pos = slots.kv.pos.astype(jnp.float32)
        return jnp.where(slots.kv.pos % self.every == 0, pos, pos - 2.0**24)


class Uniform(Score):
    """A uniform draw for every token, new at every eviction.

    Attributes:
      shared: all kv heads of a layer have one draw.
    """

    shared: bool = False

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return slots.ctx.uniform(slots.kv.pos, self.shared)


class Function(Score):
    """A function that a user wrote: `fn(kv, stats, ctx) -> "B K S"`.

    Attributes:
      fn: the function. Policies share programs where this is the same object.
      observed: what it reads of `stats`.
    """

    fn: Callable[..., Array]
    observed: tuple[Observation, ...] = ()

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return self.observed

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        try:
            found, wanted = self.fn(slots.kv, slots.stats, slots.ctx), slots.kv.pos.shape
        except (AttributeError, TypeError) as e:
            raise ValueError(
                f"{place(self.fn)}: {e}. There are kv.k, kv.v, kv.pos, kv.live and kv.num_live, ctx.length, "
                "ctx.prompt_length and ctx.tokens, and stats[...] of what is listed in observe="
            ) from e
        if getattr(found, "shape", None) != wanted:
            what = getattr(found, "shape", repr(found))
            raise ValueError(f"{place(self.fn)} returned {what}; return an array of shape {wanted}, one number a slot")
        return found


class Votes(Score):
    """The mean attention of the prompt's last rows (SnapKV, arXiv 2404.14469).

    Attributes:
      rows: how many rows vote.
      group: how the query heads of a kv head become one.
      prompt_only: rows of generated tokens do not vote; otherwise the newest rows do at every step (TOVA: `rows=1`).
      softmax: another softmax than the model's.
    """

    rows: Size = 32
    group: Literal["mean", "max", "sum"] = "mean"
    prompt_only: bool = True
    softmax: Callable[..., Any] | None = None

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        votes = Rows(self.rows, group=self.group, softmax=self.softmax)
        return (votes,) if phase == "prefill" or not self.prompt_only else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        read = jnp.minimum(slots.ctx.length, self.rows).astype(jnp.float32)
        (votes,) = self.observe("prefill")
        return slots.stats[votes] / read[:, None, None]


class Accumulated(Score):
    """Attention summed over all rows since a token was stored, of prompt and generated text alike (H2O).

    Where `of` counts a prompt's last rows alone, every block of a prompt begins anew.

    Attributes:
      of: what is summed.
      restart: rows of generated text are not summed: the newest alone counts (NaCl).
    """

    of: Rows = Rows()
    restart: bool = False

    @property
    def _apart(self) -> bool:
        """Whether every query head has its own sums: the largest of a group's sums cannot be added up row by row."""
        return self.of.group == "max" and self.of.element == "p"

    def _ask(self, phase: Phase) -> Rows:
        last = None if phase == "decode" and self.restart else self.of.last
        return dataclasses.replace(self.of, last=last, group=None if self._apart else self.of.group)

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self._ask(phase),)

    def memory(self, info: LayerInfo) -> PerSlot:
        return PerSlot((info.num_query_heads // info.num_kv_heads,) if self._apart else ())

    def _new(self, slots: Slots) -> Float[Array, "B K S *G"]:
        """The attention that the rows just read add."""
        new = slots.stats[self._ask(slots.ctx.phase)]
        if not self._apart:
            return new
        return new.reshape(len(new), slots.kv.pos.shape[1], -1, new.shape[-1]).swapaxes(2, 3)

    def _begins(self, slots: Slots) -> bool:
        """Whether sums begin with the rows just read."""
        return self.restart or (self.of.last is not None and slots.ctx.phase == "prefill")

    def update(self, slots: Slots) -> Float[Array, "B K S *G"]:
        return self._new(slots) if self._begins(slots) else slots.memory + self._new(slots)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return slots.memory.max(-1) if self._apart else slots.memory


class Faded(Accumulated):
    """A sum that fades: `memory * decay + new` (Keyformer, section 2.3.3; KVCache-Factory's Scissorhands).

    A factor on every row alike, as that section prints it, changes no rank; these two do.

    Attributes:
      decay: what the sum is multiplied by before rows are added.
      damping: what rows are multiplied by that read a head after its first eviction, and so give to the tokens that
        stay what evicted ones would have had.
    """

    decay: NonNegative = 1.0
    damping: NonNegative = 1.0

    def update(self, slots: Slots) -> Float[Array, "B K S *G"]:
        new, kv = self._new(slots), slots.kv
        if self.damping != 1.0:
            lost = kv.num_live < slots.ctx.length[:, None]
            new *= jnp.where(lost, self.damping, 1.0).reshape(*lost.shape, *(1,) * (new.ndim - 2))
        return new if self._begins(slots) else slots.memory * self.decay + new


class ValuePrior(Accumulated):
    r"""Accumulated attention, the prompt's part times a prior of value norms (AhaKV, arXiv 2506.03762, Eq. 13).

    $\hat F_j = \bar\gamma_j F_j$ with $\gamma = \mathrm{avgpool}(\lVert v\rVert_2^2)$ and $\bar\gamma = \gamma / \max
    \gamma$ over the prompt, for every kv head. Generated rows add their attention to $\hat F$.

    Attributes:
      kernel: width of the pooling; odd.
      target: what is pooled: the "value_norm", the "score" after the prior, or "both".
      each_step: the prior multiplies what generated rows add, too.
    """

    kernel: Odd = 7
    target: Literal["value_norm", "score", "both"] = "value_norm"
    each_step: bool = False

    def update(self, slots: Slots) -> Float[Array, "B K S *G"]:
        new, kv = self._new(slots), slots.kv
        if slots.ctx.phase == "prefill" or self.each_step:
            prior = self.prior(kv)

            def weighed(x: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
                return x * prior if self.target == "value_norm" else self._pooled(x * prior, kv)

            new = weighed(new) if new.ndim == 3 else jax.vmap(weighed, -1, -1)(new)
        return new if self._begins(slots) else slots.memory + new

    def prior(self, kv: LayerView) -> Float[Array, "B K S"]:
        """The weight of every token's attention, at most 1."""
        norm = jnp.where(kv.live, jnp.square(kv.v.astype(jnp.float32)).sum(-1), 0.0)
        norm = norm if self.target == "score" else self._pooled(norm, kv)
        return norm / jnp.maximum(norm.max(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)

    def _pooled(self, x: Float[Array, "B K S"], kv: LayerView) -> Float[Array, "B K S"]:
        return jnp.where(kv.live, pool_in_order(x, kv.pos, kv.live, "avg", self.kernel), 0.0)


def rows_since(slots: Slots, first: Amount = 0, count_self: bool = True) -> Float[Array, "B K S"]:
    """How many rows, from position `first` on, could see each token; at least 1.

    Args:
      slots: the slots.
      first: earlier rows do not count.
      count_self: whether a token's own row counts.
    """
    length = slots.ctx.length[:, None, None]
    seen = jnp.minimum(length - slots.kv.pos - int(not count_self), length - first if first else 2**30)
    return jnp.where(slots.kv.live, jnp.maximum(seen, 1), 1).astype(jnp.float32)


class Mean(Score):
    """The mean attention over the rows that could see a token (RoCo, arXiv 2402.06262, section 4.1).

    Attributes:
      count_self: whether a token's own row counts; otherwise the newest token has no mean, and stays.
      first: rows before this position are neither summed nor counted.
    """

    count_self: bool = True
    first: Amount = 0

    @property
    def _attention(self) -> Rows:
        return Rows(first=self.first, count_self=self.count_self)

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self._attention,)

    def memory(self, info: LayerInfo) -> PyTree:
        return PerSlot()

    def update(self, slots: Slots) -> PyTree:
        return slots.memory + slots.stats[self._attention]

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        mean = slots.memory / rows_since(slots, self.first, self.count_self)
        newest = slots.kv.pos == slots.ctx.length[:, None, None] - 1
        return mean if self.count_self else jnp.where(newest, jnp.inf, mean)


class SparedByDeviation(Mean):
    r"""The mean attention, where the `size` tokens whose attention varies most are spared (RoCo, section 4.2).

    The deviation is $\sqrt{\max(E[p^2] - E[p]^2, 0)}$ over the rows that could see a token, of the group's mean. Tokens
    that stay by their position count among the `size`.
    """

    size: Count = count(default=0)

    @property
    def _squares(self) -> Rows:
        return Rows(element="p2", first=self.first, count_self=self.count_self)

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return self._attention, self._squares

    def least(self, lengths: Prompts, budget: Prompts) -> Prompts:
        return resolve(self.size, lengths, budget)

    def memory(self, info: LayerInfo) -> tuple[PerSlot, PerSlot]:
        return PerSlot(), PerSlot()

    def update(self, slots: Slots) -> tuple:
        total, squares = slots.memory
        return total + slots.stats[self._attention], squares + slots.stats[self._squares]

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        mean, square = (m / rows_since(slots, self.first, self.count_self) for m in slots.memory)
        deviation = jnp.sqrt(jnp.maximum(square - mean * mean, 0.0))
        ranked = jnp.where(slots.candidates, deviation, jnp.inf)
        size = jnp.broadcast_to(slots.hparams.size[:, None], mean.shape[:2])
        newest = slots.kv.pos == slots.ctx.length[:, None, None] - 1
        mean = mean if self.count_self else jnp.where(newest, jnp.inf, mean)
        return jnp.where(best(ranked, slots.kv.pos, size), jnp.inf, mean)


class RowByRow(Score):
    """The mean over the last rows, of prompt and generated text alike, of a number that each of them gives a slot.

    Every slot remembers what each of the last rows gave it, of what the cache held when that row was read.

    Attributes:
      rows: how many rows.
    """

    rows: Size = 8

    def given(self, slots: Slots) -> Float[Array, "B K R S"]:
        """What each of the rows just read gives every slot."""
        raise ValueError(f"{type(self).__name__} has no `given(slots)`; give a number for every row and slot")

    def memory(self, info: LayerInfo) -> PyTree:
        return PerSlot((_places(self.rows, info),))

    def update(self, slots: Slots) -> PyTree:
        given, places, length = self.given(slots).astype(slots.memory.dtype), slots.memory.shape[-1], slots.ctx.length
        if given.shape[2] == 1:
            write = functools.partial(lax.dynamic_update_slice_in_dim, axis=-1)
            return jax.vmap(write)(slots.memory, given.swapaxes(2, 3), (length - 1) % places)
        rows, fresh = last_rows(given, places, length)
        return jnp.where(fresh[:, None, None], rows, slots.memory)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return slots.memory.sum(-1) / self.read(slots)

    def read(self, slots: Slots) -> Float[Array, "B 1 1"]:
        """How many rows there were."""
        return jnp.minimum(slots.ctx.length, self.rows).astype(jnp.float32)[:, None, None]


class LastRows(RowByRow):
    """The mean attention of the last rows (R-KV, arXiv 2505.24133).

    Attributes:
      group: how the query heads of a kv head become one, row by row.
      softmax: another softmax than the model's.
    """

    group: Literal["mean", "max", "sum"] = "mean"
    softmax: Callable[..., Any] | None = None

    @property
    def _rows(self) -> Rows:
        return Rows(self.rows, group=self.group, softmax=self.softmax, summed=False)

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self._rows,)

    def given(self, slots: Slots) -> Float[Array, "B K R S"]:
        return slots.stats[self._rows]


def _places(rows: Size, info: LayerInfo) -> int:
    """Rows that are remembered: no more than there can be."""
    return min(rows, info.prompt_len + info.max_new_tokens)


def last_rows(new: Array, num: int, length: Array) -> tuple[Array, Bool[Array, "B W"]]:
    """The rows just read, in a ring buffer: row `i` of the text has place `i % num`.

    Args:
      new: "B K R S", what the last R rows gave every slot.
      num: how many places there are, W.
      length: "B", tokens of the text.

    Returns:
      "B K S W", and which places have a new row.
    """
    R = new.shape[2]
    ago = (length[:, None] - 1 - jnp.arange(num)[None]) % num
    rows = jnp.take_along_axis(new, jnp.maximum(R - 1 - ago, 0)[:, None, :, None], axis=2).swapaxes(2, 3)
    return rows, (ago < R) & (ago < length[:, None])


class History(Score):
    """How many of the last rows gave a token more than a threshold (Scissorhands, arXiv 2305.17118, Algorithm 2).

    Every slot remembers one bit a row, in words of 32.

    Attributes:
      rows: how many rows.
      threshold: a probability, "1/visible" (one over the keys that a row sees) or "1/position".
    """

    rows: Size = 400
    threshold: float | Literal["1/visible", "1/position"] = "1/visible"

    @property
    def _rows(self) -> Rows:
        return Rows(self.rows, "above", self.threshold, summed=False)

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self._rows,)

    def memory(self, info: LayerInfo) -> PerSlot:
        return PerSlot((-(-_places(self.rows, info) // 32),), jnp.uint32)

    def update(self, slots: Slots) -> UInt32[Array, "B K S W"]:
        bits = min(self.rows, 32 * slots.memory.shape[-1])
        rows, fresh = last_rows(slots.stats[self._rows] > 0, bits, slots.ctx.length)
        return (slots.memory & ~_packed(fresh)[:, None, None]) | _packed(rows & fresh[:, None, None, :])

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return lax.population_count(slots.memory).sum(-1).astype(jnp.float32)


def _packed(bits: Bool[Array, "*n W"]) -> UInt32[Array, "*n words"]:
    """Bits as words of 32."""
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % 32)])
    return jnp.packbits(bits, axis=-1, bitorder="little").view(jnp.uint32)


class Recurrence(Score):
    r"""How soon a token should be attended to again, and how often it was (LazyEviction, arXiv 2506.15969v3).

    $2 \sigma(-1 - (t - s_j) / m_j) + 2 \sigma(1 - m_j)$ at decode step $t$, with $s_j$ the last step whose row gave the
    token more than a threshold, and $m_j$ the longest interval between two such steps; the second part is 0 where
    $m_j$ is. A token begins at the step before it came, one of the prompt at step 0, with an interval of 0. This is
    the released code's rule, which was read; the paper's text was not, and is quoted without the 1.

    Attributes:
      threshold: a probability, of the mean over a kv head's query heads.
    """

    threshold: Proportion = 1e-4

    @property
    def _rows(self) -> Rows:
        return Rows(element="above", threshold=self.threshold)

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self._rows,) if phase == "decode" else ()

    def memory(self, info: LayerInfo) -> PerSlot:
        return PerSlot((2,), jnp.int32)  # the last step, the longest interval

    def update(self, slots: Slots) -> Int[Array, "B K S 2"]:
        if slots.ctx.phase != "decode":
            return slots.memory
        step, length = slots.ctx.step[:, None, None], slots.ctx.length[:, None, None]
        last = jnp.where(slots.kv.pos == length - 1, step - 1, slots.memory[..., 0])
        active = slots.stats[self._rows] > 0
        longest = jnp.where(active, jnp.maximum(slots.memory[..., 1], step - last), slots.memory[..., 1])
        return jnp.stack([jnp.where(active, step, last), longest], -1)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        last, longest = (slots.memory[..., i].astype(jnp.float32) for i in (0, 1))
        since = slots.ctx.step[:, None, None].astype(jnp.float32) - last
        often = jnp.where(longest > 0, jax.nn.sigmoid(1 - longest), 0.0)
        return 2 * (jax.nn.sigmoid(-1 - since / (longest + 1e-5)) + often)


class Repeated(Score):
    """The most attention that a token gets while the prompt is repeated.

    Attributes:
      how: how it is repeated.
    """

    how: Reread

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self.how,) if phase == "replay" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return slots.stats[self.how]
