"""FastGen: every head is profiled on the prompt, and keeps the cheapest set of tokens that serves it."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int8

from kvjax.contract import (
    EMPTY,
    Amount,
    AttentionInputs,
    Context,
    Count,
    LayerInfo,
    LayerView,
    Layout,
    Observation,
    PerHead,
    PerSlot,
    Phase,
    Policy,
    Prompts,
    Proportion,
    Sizes,
    Stats,
    data,
    resolve,
    value,
)
from kvjax.decide.select import best
from kvjax.observe import Queries, Rows, on_new_slots
from kvjax.pallas_kernels import recovered_attention
from kvjax.pallas_kernels.kinds import PositiveProportion

STRATEGIES = ("special", "punctuation", "frequent", "local", "full")
"""Sets of tokens that a head may keep, by number; each holds those before it, and more."""

SPECIAL, PUNCTUATION, FREQUENT, LOCAL, FULL = range(len(STRATEGIES))
UNKNOWN, PLAIN, MARK, DECLARED = range(4)  # kinds of token; a slot that was just filled starts at 0


@value
class Kinds:
    """Observes which of the new tokens are special or punctuation, by their ids: "B K S", 0 where none is new.

    Attributes:
      special, punctuation: ids; what is in both is special.
    """

    special: tuple[int, ...]
    punctuation: tuple[int, ...]

    def __call__(self, inputs: AttentionInputs) -> Int8[Array, "B K S"]:
        ids = inputs.ctx.tokens
        kind = jnp.where(jnp.isin(ids, jnp.asarray(self.punctuation, jnp.int32)), MARK, PLAIN)
        kind = jnp.where(jnp.isin(ids, jnp.asarray(self.special, jnp.int32)), DECLARED, kind)
        kind = jnp.where(inputs.pos == EMPTY, UNKNOWN, kind)
        return on_new_slots(kind, inputs, UNKNOWN).astype(jnp.int8)


@value
class WholeQueries:
    """Observes the queries themselves, for policies that compute attention once they know of which slots."""

    def __call__(self, inputs: AttentionInputs) -> Queries:
        return Queries(inputs.q, inputs.pos, inputs.bias, inputs.logits)


class FastGen(Policy):
    """Keeps in every kv head the smallest set of `STRATEGIES` that recovers enough of its attention to the prompt.

    A head's set is chosen after the prompt and maintained at every step; what was evicted stays gone.

    Attributes:
      special, punctuation: ids of the two kinds of tokens.
      frequent: the most attended tokens, as a share of all so far.
      local: the newest tokens, as a share of the prompt.
      recovery: what a set must recover of the attention.
      by: "mass": the probability on the set, averaged over the prompt's rows. "entries": the share of visible entries
        that change by less than 1e-4 when rows are renormalised.
      rounding: of both shares.
      budget: the most tokens that a head keeps, in a pool on average; None bounds nothing. A head over it drops what is
        last in the list: of what "full" alone keeps the least attended, then the oldest local tokens, then the least
        frequent.
      pool: the heads of a layer share `budget` slots a head, divided once after the prompt: each gets what its set
        takes, the largest cut to one level where that is too much; then heads that keep everything get what they will
        add; what is left goes to all alike.
    """

    special: tuple[Amount, ...]
    punctuation: tuple[Amount, ...]
    frequent: Proportion = 0.3
    local: Proportion = 0.3
    recovery: PositiveProportion = 0.95
    by: Literal["mass", "entries"] = "mass"
    rounding: Literal["floor", "ceil"] = "floor"
    budget: Count | None = data(default=None)
    pool: bool = False

    def __post_init__(self) -> None:
        if self.pool and self.budget is None:
            raise ValueError("a pool has a number of slots, but what heads need is known only later; give a budget")

    @property
    def layout(self) -> Layout:
        return Layout(pool=self.pool, prompt="whole")

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return Rows(), Kinds(self.special, self.punctuation), *((WholeQueries(),) if phase == "prefill" else ())

    def sizes(self, info: LayerInfo, lengths: Prompts) -> Sizes:
        def whole(share: Proportion, n: np.ndarray) -> np.ndarray:
            return np.floor(share * n + 1e-9) if self.rounding == "floor" else np.ceil(share * n - 1e-9)

        often = whole(self.frequent, np.arange(info.prompt_len + info.max_new_tokens + 1))
        counts = np.repeat(often[None], len(lengths), 0), whole(self.local, lengths)
        numbers = tuple(jnp.asarray(x, jnp.int32) for x in counts)
        if self.budget is None:
            return dataclasses.replace(super().sizes(info, lengths), hparams=numbers)
        every, coming, K = info.prompt_len + info.max_new_tokens, min(1, info.max_new_tokens), info.num_kv_heads
        cap = np.clip(resolve(self.budget, lengths), 1, every)
        most = np.minimum(every, cap * (K if self.pool else 1) + coming)
        return Sizes(most, K * np.minimum(every, cap + coming), (*numbers, jnp.asarray(cap, jnp.int32)))

    def memory(self, info: LayerInfo) -> tuple[PerSlot | PerHead, ...]:
        strategy = PerHead(dtype=jnp.int32, fill=-1)  # and in a pool the most that each head keeps
        return PerSlot(dtype=jnp.int8), PerSlot(), *([strategy] * (1 + self.pool))

    def reserve(self, kv: LayerView, ctx: Context) -> Int[Array, "B K"]:
        most = super().reserve(kv, ctx)
        return jnp.minimum(kv.memory[-1] + jnp.minimum(ctx.max_new_tokens, 1)[:, None], most) if self.pool else most

    def update(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        kinds, mass, strategy, *caps = kv.memory
        kinds = jnp.where(kinds == UNKNOWN, stats[Kinds(self.special, self.punctuation)], kinds)
        mass = mass + stats[Rows()]
        level = self._levels(kv, kinds, mass, ctx)
        if ctx.phase == "prefill":
            strategy = jnp.where(strategy < 0, self._chosen(kv, level, stats[WholeQueries()], ctx), strategy)
        keep = level <= strategy[..., None]
        for cap in ctx.hparams[2:]:  # there is none without a budget
            if self.pool and ctx.phase == "prefill":
                caps = [self._divided(keep.sum(-1), strategy, cap, ctx)]
            keep &= self._first(kv, level, mass, caps[0] if caps else jnp.broadcast_to(cap[:, None], strategy.shape))
        return kv.replace(memory=(kinds, mass, strategy, *caps)).keep(keep)

    def _first(self, kv: LayerView, level: Array, mass: Array, cap: Int[Array, "B K"]) -> Bool[Array, "B K S"]:
        """The first `cap` slots of every head in the order of `STRATEGIES`."""
        rank = jnp.where(level == LOCAL, kv.pos.astype(jnp.float32), mass)
        order = jnp.lexsort((-kv.pos, -rank, level), axis=-1)
        chosen = jnp.arange(kv.pos.shape[-1])[None, None] < cap[..., None]
        return jnp.put_along_axis(kv.live, order, chosen, axis=-1, inplace=False)

    def _divided(
        self, needed: Int[Array, "B K"], strategy: Int[Array, "B K"], cap: Int[Array, "B"], ctx: Context
    ) -> Int[Array, "B K"]:
        """How the slots of a pool are divided over heads."""
        K = needed.shape[1]
        left, given = cap[:, None] * K, jnp.zeros_like(needed)
        for wanted in (needed, jnp.where(strategy == FULL, ctx.max_new_tokens[:, None], 0)):
            smaller = jnp.pad(jnp.cumsum(jnp.sort(wanted, axis=-1), axis=-1)[:, :-1], [(0, 0), (1, 0)])
            level = ((left - smaller) // (K - jnp.arange(K))[None]).max(-1, keepdims=True)
            part = jnp.minimum(wanted, jnp.maximum(level, 0))
            left, given = left - part.sum(-1, keepdims=True), given + part
        return (given + left // K).astype(jnp.int32)

    def _levels(self, kv: LayerView, kinds: Array, mass: Array, ctx: Context) -> Int[Array, "B K S"]:
        """The first of `STRATEGIES` that holds each slot; beyond the last for dead ones."""
        frequent = jnp.take_along_axis(ctx.hparams[0], ctx.length[:, None], 1)
        often = best(mass, kv.pos, jnp.broadcast_to(frequent, kv.pos.shape[:2]))
        late = kv.pos >= (ctx.length - ctx.hparams[1])[:, None, None]
        level = jnp.full(kv.pos.shape, FULL)
        sets = (LOCAL, late), (FREQUENT, often), (PUNCTUATION, kinds == MARK), (SPECIAL, kinds == DECLARED)
        for strategy, members in sets:
            level = jnp.where(members, strategy, level)
        return jnp.where(kv.live, level, FULL + 1)

    def _chosen(self, kv: LayerView, level: Array, rows: Queries, ctx: Context) -> Int[Array, "B K"]:
        """The smallest set of every head that recovers enough of the prompt's attention."""
        sets = jnp.stack([level <= s for s in (SPECIAL, PUNCTUATION, FREQUENT, FREQUENT)])
        found = recovered_attention(
            rows.q,
            kv.k,
            rows.pos,
            kv.pos,
            sets,
            within=(None, None, None, ctx.hparams[1]),
            tolerance=None if self.by == "mass" else 1e-4,
            bias=rows.bias,
            logits=rows.logits,
        )
        enough = jnp.asarray(found.mass if self.by == "mass" else found.elementwise) >= self.recovery
        return jnp.where(enough.any(-1), enough.argmax(-1), FULL).astype(jnp.int32)


def fastgen(
    special: Iterable[int],
    punctuation: Iterable[int],
    *,
    frequent: Proportion = 0.3,
    local: Proportion = 0.3,
    recovery: float = 0.95,
) -> FastGen:
    """Keeps in every head the cheapest set of tokens that serves it (FastGen, Ge et al., arXiv 2310.01801).

    The sets are nested (Algorithm 1): special tokens; punctuation; frequent ones; local ones; all. How many tokens stay
    is an outcome. `fastgen(*token_classes(tokenizer))` finds the ids.

    Args:
      special, punctuation: ids of the two kinds of tokens.
      frequent: the most attended tokens, as a share of all so far.
      local: the newest tokens, as a share of the prompt.
      recovery: the attention that a set must recover; the paper has 0.91 to 0.98.
    """
    return FastGen(tuple(sorted(set(special))), tuple(sorted(set(punctuation))), frequent, local, recovery)
