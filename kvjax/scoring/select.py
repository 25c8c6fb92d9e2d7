"""Which slots survive, given a score for each and a budget for every head."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from kvjax.cache.context import Context, Phase, Site
from kvjax.cache.state import EMPTY, LayerKV, evict, position_order
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.pallas_kernels.values import Value, a, each, flag, number, one_of, optional, settle, tokens
from kvjax.scoring.stats import LayerStats, Measurement, Slots
from kvjax.sizes.budget import Count, Counts, Tokens, counted, counted_rows

Ties = Literal["evict_older", "lower_index"]

_ONE_BY_ONE = 4  # up to this many evictions a head, finding the worst repeatedly is cheapest
_ROUNDS = 2  # so many slots are asked if they are protected, before all that are protected are found


@pytree
class Selection:
    """What was decided for one layer.

    Attributes:
      keep: the slots that stay live.
      score: the score they were ranked by, -inf for slots that were dead already. Protected slots stay whatever theirs.
      budgets: live slots that every head may keep, as planned.
      gate: how much of every slot a relaxed policy keeps, in [0, 1]; it keeps some of everything.
      most: how many live slots of a head are not kept at most, where that is known (static).
    """

    keep: Bool[Array, "B K S"]
    score: Float[Array, "B K S"]
    budgets: Int[Array, "B K"]
    gate: Float[Array, "B K S"] | None = None
    most: int | None = static(default=None)

    def apply(self, kv: LayerKV) -> LayerKV:
        """The layer without the slots that go, or with the gates of a relaxed policy."""
        return evict(kv, self.keep, most=self.most) if self.gate is None else dataclasses.replace(kv, gate=self.gate)


@pytree
class InTurn(Selection):
    """What selections decide that are applied one after the other, some of which change more than slots or gates.

    Attributes:
      each: the selections; the other fields say what all of them together do.
    """

    each: tuple[Selection, ...] = ()

    def apply(self, kv: LayerKV) -> LayerKV:
        """See `Selection`."""
        return functools.reduce(lambda kv, selection: selection.apply(kv), self.each, kv)


def check_plain(selection: Selection, where: str) -> None:
    """Raises ValueError for a selection of a class of one's own, whose changes are lost where only slots are looked at.

    Args:
      selection: the selection.
      where: why that is all, and what to do.
    """
    if type(selection) is not Selection:
        raise ValueError(
            f"the selection is a {type(selection).__name__}, which changes more of a layer than which slots are live, "
            f"but {where}"
        )


@dataclasses.dataclass(frozen=True)
class Spares:
    """What a scope protects, for those who may not need all of it.

    Attributes:
      asked: whether single slots are protected: a live one of every head that is not safe, marked True.
      found: all that are protected.
    """

    asked: Callable[[Bool[Array, "B K S"]], Bool[Array, "B K"]]
    found: Callable[[], Bool[Array, "B K S"]]


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much may be kept.

    Attributes:
      budgets: live slots that every head may keep.
      most: an upper bound of the evictions in one head (static), None if unknown.
      counts: resolves further counts in this layer.
      memory: what the selection carries (`Select.init`).
      summands: what divides a score into a mean (`Score.summands`).
      spares: what is protected beyond the slots that are `safe`; None where `safe` has it. Only selections that ask
        (`Select.asks`) are given it.
    """

    budgets: Int[Array, "B K"] | Float[Array, "B K"]
    most: int | None
    counts: Counts
    memory: Any = ()
    summands: int | Int[Array, "B"] = 1
    spares: "Spares | None" = None


@dataclasses.dataclass(frozen=True)
class Stage:
    """One pass of a selection: the best `count` of what earlier passes left.

    Attributes:
      score: larger = keep.
      count: slots that every head takes in this pass.
    """

    score: Float[Array, "*heads S"]
    count: Int[Array, "*heads"] | Float[Array, "*heads"]


@jax.jit
def largest(keys: Sequence[Array], counts: Int[Array, "B #K"]) -> Bool[Array, "B K S"]:
    """The `counts` largest slots of every head by the first key, among equals by the next; the last has no equals.

    Keys are integers or floats of 32 bits, or of 64. The bar that `counts` slots reach is found bit by bit, which on
    CPU is many times faster than sorting.
    """
    shape = keys[0].shape
    left = jnp.broadcast_to(counts, shape[:2]).astype(jnp.int32)
    chosen, among = jnp.zeros(shape, bool), jnp.broadcast_to((left > 0)[..., None], shape)
    for i, key in enumerate(keys):
        bits = _ordered_bits(key)
        width = 8 * bits.dtype.itemsize
        # Where as many are equal as are wanted of them, the bar of the next key is the lowest: nothing is looked for.
        steps = width if i == 0 else jnp.where((among.sum(-1, dtype=jnp.int32) > left).any(), width, 0)

        def raise_bar(i, bar, bits=bits, among=among, left=left, last=width - 1):
            higher = bar | (jnp.ones((), bar.dtype) << (last - i).astype(bar.dtype))
            reached = (among & (bits >= higher[..., None])).sum(-1, dtype=jnp.int32)
            return jnp.where(reached >= left, higher, bar)

        bar = jnp.zeros(shape[:2], bits.dtype)
        bar = lax.fori_loop(jnp.int32(0), jnp.int32(steps), raise_bar, bar)[..., None]
        above = among & (bits > bar)
        chosen, among = chosen | above, among & (bits == bar)
        left = left - above.sum(-1, dtype=jnp.int32)
    return chosen | among


def _ordered_bits(x: Array) -> UInt[Array, "B K S"]:
    """Bits that compare, without sign, as the numbers do."""
    unsigned = jnp.uint64 if x.dtype.itemsize == 8 else jnp.uint32
    sign = jnp.ones((), unsigned) << (8 * x.dtype.itemsize - 1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return lax.bitcast_convert_type(x, unsigned) ^ sign
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros((), x.dtype), x), unsigned)  # -0.0 is 0.0
    return jnp.where(bits >= sign, ~bits, bits ^ sign)


class Select(Value, abc.ABC):
    """A frozen dataclass that turns scores and budgets into a `Selection`."""

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """The statistics that `__call__` reads in this phase."""
        del phase
        return ()

    @property
    def slack(self) -> int:
        """How many more than its budget a head may be left with."""
        return 0

    @property
    def counts(self) -> tuple[int | float | Count, ...]:
        """The counts that it resolves with `Limits.counts`."""
        return ()

    @property
    def finite(self) -> bool:
        """Whether it has tables with an entry for every position that is planned for."""
        return False

    @property
    def by_head(self) -> bool:
        """Whether every head gets what its own budget allows; otherwise all heads keep the same tokens."""
        return True

    @property
    def relaxed(self) -> bool:
        """Whether the result is gates, between 0 and 1, instead of a mask (`kvjax.learning.relax.Soft`)."""
        return False

    @property
    def staged(self) -> bool:
        """Whether the selection is a sequence of passes of top-k (`stages`), which can be relaxed."""
        return False

    def asks(self, most: int | None) -> bool:
        """Whether it asks if single slots are protected (`Limits.spares`), for up to `most` evictions a head."""
        del most
        return False

    def init(self, site: Site, batch: int) -> Any:
        """What the selection carries in a layer without slots, which comes back as `Limits.memory`."""
        del site, batch
        return ()

    def stages(
        self,
        score: Float[Array, "B K S"],
        safe: Bool[Array, "B K S"],
        slots: Slots,
        limits: Limits,
    ) -> tuple[Stage, ...]:
        """The selection as passes of top-k over the slots that are not `safe`, which is what can be relaxed.

        Counts add up to what the budgets leave beside the safe slots. Arguments are as in `__call__`.
        """
        raise NotImplementedError(f"{self} is no sequence of top-k passes")

    @abc.abstractmethod
    def __call__(
        self,
        score: Float[Array, "B K S"],
        safe: Bool[Array, "B K S"],
        slots: Slots,
        limits: Limits,
    ) -> Selection:
        """The slots to keep, and if `relaxed` their gates. The `score` of the result is replaced by the policy's own.

        Args:
          score: larger = keep. Dead slots are ignored.
          safe: protected slots, which stay whatever their score.
          slots: as for scores.
          limits: how much may be kept.
        """


def _beside(safe: Bool[Array, "B K S"], budgets: Array) -> Array:
    """What budgets leave beside the protected slots."""
    return jnp.maximum(budgets - safe.sum(-1, dtype=jnp.int32).astype(budgets.dtype), jnp.zeros((), budgets.dtype))


@dataclasses.dataclass(frozen=True)
class TopK(Select):
    """Keeps the highest scores.

    Attributes:
      ties: among equal scores, "evict_older" keeps the larger position, as every first-index argmin over a cache in
        order does; "lower_index" keeps the smaller one, as `jax.lax.top_k` does.
    """

    ties: Ties = "evict_older"

    def __post_init__(self):
        one_of("TopK.ties", self.ties, *get_args(Ties))

    def __call__(self, score, safe, slots, limits):
        """See `Select`."""
        kv = slots.kv
        ranked = jnp.where(safe, jnp.inf, score)
        if limits.spares is not None:
            keep = self.drop_one(ranked, kv.pos, limits.budgets, limits.spares)
        elif limits.most is not None and limits.most <= _ONE_BY_ONE:
            keep = self.drop(ranked, kv.pos, limits.budgets, limits.most)
        else:
            return Selection(self.best(ranked, kv.pos, limits.budgets), score, limits.budgets)
        return Selection(keep, score, limits.budgets, most=limits.most)

    def asks(self, most: int | None) -> bool:
        """See `Select`: where one slot goes, of which hardly ever more than one is a candidate."""
        return most == 1

    @property
    def staged(self) -> bool:
        """See `Select`."""
        return True

    def stages(self, score, safe, slots, limits):
        """See `Select`."""
        del slots
        return (Stage(score, _beside(safe, limits.budgets)),)

    def best(
        self, score: Float[Array, "B K S"], pos: Int[Array, "B K S"], budgets: Int[Array, "B K"]
    ) -> Bool[Array, "B K S"]:
        """The `budgets` best live slots of every head."""
        live = pos != EMPTY
        age = pos if self.ties == "evict_older" else -pos
        return live & largest((jnp.where(live, score, -jnp.inf), age), budgets)

    def drop(
        self, score: Float[Array, "B K S"], pos: Int[Array, "B K S"], budgets: Int[Array, "B K"], most: int
    ) -> Bool[Array, "B K S"]:
        """All live slots but the worst of every head, found one by one, up to `most` times."""
        keep = pos != EMPTY
        excess = keep.sum(-1, dtype=jnp.int32) - budgets
        for i in range(most):
            keep = keep & ~(self._worst(jnp.where(keep, score, jnp.inf), keep, pos) & (i < excess)[..., None])
        return keep

    def _worst(
        self, score: Float[Array, "B K S"], among: Bool[Array, "B K S"], pos: Int[Array, "B K S"]
    ) -> Bool[Array, "B K S"]:
        """The slot that goes first."""
        age = pos if self.ties == "evict_older" else -pos
        worst = among & (score == score.min(-1, keepdims=True))
        first = jnp.where(worst, age, jnp.iinfo(age.dtype).max).min(-1, keepdims=True)
        return worst & (age == first)

    def drop_one(
        self, score: Float[Array, "B K S"], pos: Int[Array, "B K S"], budgets: Int[Array, "B K"], spares: "Spares"
    ) -> Bool[Array, "B K S"]:
        """All live slots but the worst that is not spared; of a head that spares all, the oldest goes.

        Every round asks one slot of each head that has not found its own. Where a few rounds find none, as those do
        that look for small means among large deviations, all that is spared is found at once.
        """
        live = pos != EMPTY

        def ask(carry):
            i, score, found, looking = carry
            asked = self._worst(jnp.where(live, score, jnp.inf), live, pos)
            out = ~jnp.isfinite(jnp.where(asked, score, -jnp.inf).max(-1))  # nobody is left to ask
            spared = spares.asked(asked) & ~out
            found = jnp.where(looking[..., None], asked, found)
            return i + 1, jnp.where(asked & spared[..., None], jnp.inf, score), found, looking & spared

        over = live.sum(-1, dtype=jnp.int32) > budgets
        start = jnp.int32(0), score, jnp.zeros_like(live), over
        _, _, found, looking = lax.while_loop(lambda c: c[3].any() & (c[0] < _ROUNDS), ask, start)
        keep = lambda: self.drop(jnp.where(spares.found(), jnp.inf, score), pos, budgets, 1)
        return lax.cond(looking.any(), keep, lambda: live & ~found)


@dataclasses.dataclass(frozen=True)
class AboveThreshold(Select):
    """Keeps what scores at least a threshold, beside what is protected; the best of it where it exceeds the budget.

    How much is kept is an outcome, as in dynamic memory sparsification (arXiv 2506.05345); the budget is the most.

    Attributes:
      threshold: in units of the score.
      ties: see `TopK`.
    """

    threshold: float
    ties: Ties = "evict_older"

    def __post_init__(self):
        settle(self, threshold=number())
        one_of("AboveThreshold.ties", self.ties, *get_args(Ties))

    def __call__(self, score, safe, slots, limits):
        """See `Select`."""
        best = TopK(self.ties)(score, safe, slots, limits)
        return Selection(best.keep & (safe | (score >= self.threshold)), score, limits.budgets)


@dataclasses.dataclass(frozen=True)
class TopKThenRandom(Select):
    r"""Keeps the best, and draws the rest of the budget without replacement (NaCl, arXiv 2408.03675, section 3.3).

    The draw is a Gumbel top-k: $\log$ probability plus Gumbel noise, independent over layers, heads and sequences.

    Attributes:
      random: how many of the budget are drawn: tokens, a share of the prompt (float), or a share of the budget; no more
        than protection leaves of it.
      pool: "rest" draws among what the first stage left (the released code), "all" among every unprotected token (the
        paper's formula); what is drawn twice is then kept once, and the budget not filled (D-15).
      distribution: "softmax" of the raw scores, "normalised" scores, or "uniform" (the ablation of Table 3).
      temperature: divides the log-probabilities.
      shared: one draw for all heads of a layer.
      ties: see `TopK`.
    """

    random: int | float | Count
    pool: Literal["rest", "all"] = "rest"
    distribution: Literal["softmax", "normalised", "uniform"] = "softmax"
    temperature: float = 1.0
    shared: bool = False
    ties: Ties = "evict_older"

    def __post_init__(self):
        settle(self, random=counted, temperature=number("(0, inf)", "must be positive and finite"), shared=flag)
        one_of("TopKThenRandom.pool", self.pool, "rest", "all")
        one_of("TopKThenRandom.distribution", self.distribution, "softmax", "normalised", "uniform")
        one_of("TopKThenRandom.ties", self.ties, *get_args(Ties))

    @property
    def counts(self) -> tuple[int | float | Count, ...]:
        """See `Select`."""
        return (self.random,)

    def __call__(self, score, safe, slots, limits):
        """See `Select`."""
        kv, ctx = slots.kv, slots.ctx
        best = TopK(self.ties).best
        excess = kv.num_live > limits.budgets
        unprotected = jnp.maximum(limits.budgets - safe.sum(-1, dtype=jnp.int32), 0)
        random = jnp.where(excess, jnp.minimum(limits.counts(self.random)[:, None], unprotected), 0)
        first = best(jnp.where(safe, jnp.inf, score), kv.pos, limits.budgets - random)
        pool = kv.live & ~safe & ~(first if self.pool == "rest" else jnp.zeros_like(first))
        second = best(self.drawn(score, kv, ctx, pool), jnp.where(pool, kv.pos, EMPTY), random)
        return Selection(first | second, score, limits.budgets)

    def drawn(
        self, score: Float[Array, "B K S"], kv: LayerKV, ctx: Context, pool: Bool[Array, "B K S"]
    ) -> Float[Array, "B K S"]:
        """Log-probabilities with Gumbel noise: their top-k is a draw without replacement."""
        if self.distribution == "softmax":
            log_p = score
        elif self.distribution == "normalised":
            log_p = jnp.log(jnp.maximum(jnp.where(pool, score, 0.0), 1e-30))
        else:
            log_p = jnp.zeros_like(score)
        u = jnp.clip(ctx.uniform(kv.pos, shared=self.shared), 1e-7, 1 - 1e-7)
        gumbel = -jnp.log(-jnp.log(u))
        return jnp.where(pool, log_p / self.temperature + gumbel, -jnp.inf)

    @property
    def staged(self) -> bool:
        """See `Select`. With `pool="all"` what is drawn twice does not add up."""
        return self.pool == "rest"

    def stages(self, score, safe, slots, limits):
        """See `Select`."""
        kv, ctx = slots.kv, slots.ctx
        rest = _beside(safe, limits.budgets)
        random = jnp.minimum(limits.counts(self.random)[:, None].astype(rest.dtype), rest)
        return Stage(score, rest - random), Stage(self.drawn(score, kv, ctx, kv.live & ~safe), random)


@dataclasses.dataclass(frozen=True)
class RandomRun(Select):
    """Drops one contiguous run of tokens, the same in all heads and layers (EasyKV's "random" while encoding, D-05)."""

    @property
    def by_head(self) -> bool:
        """See `Select`."""
        return False

    def __call__(self, score, safe, slots, limits):
        """See `Select`."""
        kv, ctx = slots.kv, slots.ctx
        candidates = kv.live & ~safe
        order = position_order(jnp.where(candidates, kv.pos, EMPTY))
        S = kv.num_slots
        count = candidates.sum(-1, dtype=jnp.int32)
        place = jnp.put_along_axis(
            jnp.zeros_like(kv.pos),
            order,
            jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), kv.pos.shape),
            -1,
            inplace=False,
        )
        rank = place - (S - count)[..., None]  # of a candidate among candidates, by position
        excess = jnp.maximum(kv.num_live - limits.budgets, 0)
        draw = jax.vmap(lambda key, event: jax.random.uniform(jax.random.fold_in(key, event), (), jnp.float32))
        start = jnp.floor(draw(ctx.keys, ctx.event)[:, None] * (count - excess + 1).astype(jnp.float32)).astype(
            jnp.int32
        )
        inside = (rank >= start[..., None]) & (rank < (start + excess)[..., None])
        return Selection(kv.live & ~(candidates & inside), score, limits.budgets)


@dataclasses.dataclass(frozen=True)
class TwoStage(Select):
    """Keeps the best by score, then the best of the rest by score times another measurement (CriticalKV).

    From "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective", arXiv 2502.03805,
    Algorithm 1.

    Attributes:
      weight: what scores are multiplied by in the second stage.
      first: share of the budget that the first stage fills, rounded down, to one token at least unless it is 0.
      eps: added to scores in the second stage. Its scale is that of the mean over rows and heads, which is what the
        published code adds it to; a score that is a sum of votes (`Score.summands`) gets as many times more.
      ties: see `TopK`.
      least: tokens that the first stage fills at least, as far as a head's budget goes.
    """

    weight: Measurement
    first: float = 0.5
    eps: float = 1e-4
    ties: Ties = "evict_older"
    least: int | float | Count = 0

    def __post_init__(self):
        settle(
            self,
            weight=a(Measurement),
            first=number("[0, 1]", "the first stage fills a share of the budget in [0, 1]"),
            eps=number("[0, inf)", "what is added to scores is finite, not negative"),
            least=counted,
        )
        one_of("TwoStage.ties", self.ties, *get_args(Ties))

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Select`."""
        del phase
        return (self.weight,)

    @property
    def counts(self) -> tuple[int | float | Count, ...]:
        """See `Select`."""
        return () if self.least == Tokens(0) else (self.least,)

    def __call__(self, score, safe, slots, limits):
        """See `Select`."""
        kv, stats = slots.kv, slots.stats
        best = TopK(self.ties).best
        ranked = jnp.where(safe, jnp.inf, score)
        first = best(ranked, kv.pos, self._size(limits))
        second = jnp.where(first | safe, jnp.inf, self._weighted(score, stats, limits))
        return Selection(best(second, kv.pos, limits.budgets), score, limits.budgets)

    def _weighted(self, score: Float[Array, "B K S"], stats: LayerStats, limits: Limits) -> Float[Array, "B K S"]:
        eps = self.eps * jnp.asarray(limits.summands, jnp.float32).reshape(-1, 1, 1)
        return (score + eps) * stats[self.weight].astype(jnp.float32)

    def _size(self, limits: Limits) -> Array:
        """What the first stage fills; rounded down where budgets are whole numbers, to one token at least."""
        budgets = limits.budgets
        whole = jnp.issubdtype(budgets.dtype, jnp.integer)
        size = (budgets.astype(jnp.float32) if whole else budgets) * self.first
        size = jnp.floor(size + 1e-6).astype(jnp.int32) if whole else size
        least = jnp.asarray(self.first > 0, size.dtype)
        if self.counts:
            least = jnp.maximum(limits.counts(self.least)[:, None].astype(size.dtype), least)
        return jnp.minimum(jnp.maximum(size, least), budgets)

    @property
    def staged(self) -> bool:
        """See `Select`."""
        return True

    def stages(self, score, safe, slots, limits):
        """See `Select`."""
        stats = slots.stats
        rest = _beside(safe, limits.budgets)
        first = jnp.minimum(_beside(safe, self._size(limits)), rest)
        return Stage(score, first), Stage(self._weighted(score, stats, limits), rest - first)


@dataclasses.dataclass(frozen=True)
class Chunks(Select):
    """Keeps whole chunks of neighbouring tokens, the same in all kv heads (ChunkKV, arXiv 2502.00299).

    Scores are summed over heads and averaged over a chunk; a short last chunk is a chunk. `share` of the chunks are
    kept, rounded down, at least one, so the number of tokens is near the budget and may exceed it by less than a chunk.
    Where something has been evicted before, or layers have other budgets, it is the budget over the live tokens.
    Chunks of protected tokens come first; where there are more of those, protected tokens stay without their chunk.

    Attributes:
      size: tokens of a chunk.
      share: of the chunks of a prompt that are kept; the budget over the live tokens if None.
    """

    size: int = 20
    share: float | None = None

    def __post_init__(self):
        settle(self, size=tokens(1, "a chunk has at least one token"), share=optional(number("(0, 1]")))

    @property
    def slack(self) -> int:
        """See `Select`."""
        return self.size

    @property
    def finite(self) -> bool:
        """See `Select`."""
        return True

    @property
    def by_head(self) -> bool:
        """See `Select`."""
        return False

    def __call__(self, score, safe, slots, limits):
        """See `Select`."""
        kv, ctx = slots.kv, slots.ctx
        B, K, _ = score.shape
        total = ctx.site.prompt_len + ctx.site.max_new_tokens
        size = min(self.size, total)
        num = -(-total // size)
        chunk = jnp.where(kv.live, kv.pos // size, num)
        batch, head = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
        by_chunk = lambda x: jnp.zeros((B, K, num), x.dtype).at[batch, head, chunk].add(x, mode="drop")
        tokens = by_chunk(kv.live.astype(jnp.int32))  # "B K chunks"
        protected = by_chunk((kv.live & safe).astype(jnp.int32))
        count = tokens.sum(1)
        share = lambda x: x.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
        mean = jnp.where(count > 0, share(by_chunk(jnp.where(kv.live, score, 0.0)).sum(1)), -jnp.inf)
        rank = jnp.argsort(jnp.lexsort((-mean, -share(protected.sum(1)))), axis=-1).astype(jnp.int32)

        existing = (count > 0).sum(-1, dtype=jnp.int32)
        live, budget = kv.num_live.max(-1), limits.budgets.min(-1)
        wanted = budget.astype(jnp.float32) / jnp.maximum(live, 1).astype(jnp.float32)
        if self.share is not None:  # the same in exact numbers, where the budget is this share of what is there
            whole = self.share * ctx.prompt_length.astype(jnp.float32)
            exact = (live == ctx.prompt_length) & (jnp.abs(budget.astype(jnp.float32) - whole) < 1)
            wanted = jnp.where(exact, self.share, wanted)
        wanted = jnp.maximum(jnp.floor(existing.astype(jnp.float32) * wanted + 1e-5).astype(jnp.int32), 1)
        # A head is left with its chunks and with what is protected elsewhere: too much where chunks have lost tokens.
        in_order = lambda x: jnp.put_along_axis(
            jnp.zeros_like(x), jnp.broadcast_to(rank[:, None], x.shape), x, axis=-1, inplace=False
        )
        grown = jnp.cumsum(in_order(tokens - protected), axis=-1, dtype=jnp.int32)
        grown = grown + protected.sum(-1, keepdims=True, dtype=jnp.int32)
        fits = (grown <= (budget + size - 1)[:, None, None]).all(1).sum(-1, dtype=jnp.int32)
        wanted = jnp.where(live <= budget, existing, jnp.minimum(wanted, fits))
        kept = (rank < wanted[:, None]) & (count > 0)
        kept = jnp.broadcast_to(kept[:, None], tokens.shape)
        keep = kv.live & (safe | jnp.take_along_axis(kept, jnp.minimum(chunk, num - 1), axis=-1))
        return Selection(keep, score, limits.budgets)


@dataclasses.dataclass(frozen=True)
class PerChunk(Select):
    """Every chunk of the text keeps its own best: as large a share of it as the budget is of the whole (FINCH).

    Chunks are cut at multiples of `size` positions; what a chunk's share holds is rounded down, to one token at least.
    Protected tokens stay, and count against the share of their chunk. Where chunks together keep more than the budget,
    the worst of all make room.

    Attributes:
      size: tokens of a chunk.
      share: tokens of a chunk that stay, a count of its own length; the budget over the live tokens if None.
      ties: see `TopK`.
    """

    size: int
    share: float | Count | None = None
    ties: Ties = "evict_older"

    def __post_init__(self):
        settle(self, size=tokens(1, "a chunk has at least one token"), share=optional(counted_rows))
        one_of("PerChunk.ties", self.ties, *get_args(Ties))

    def __call__(self, score, safe, slots, limits):
        """See `Select`."""
        kv = slots.kv
        S, live = kv.num_slots, kv.live
        chunk = jnp.where(live, kv.pos // self.size, jnp.iinfo(jnp.int32).max)
        age = kv.pos if self.ties == "evict_older" else -kv.pos
        order = jnp.lexsort((-age, -jnp.where(safe, jnp.inf, score), chunk), axis=-1)
        by_order = jnp.take_along_axis(chunk, order, axis=-1)
        place = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), by_order.shape)
        begins = jnp.concatenate([jnp.ones_like(live[..., :1]), by_order[..., 1:] != by_order[..., :-1]], axis=-1)
        start = lax.cummax(jnp.where(begins, place, 0), axis=by_order.ndim - 1)
        ends = jnp.concatenate([begins[..., 1:], jnp.ones_like(live[..., :1])], axis=-1)
        last = lax.cummin(jnp.where(ends, place, S), axis=by_order.ndim - 1, reverse=True)
        length = last - start + 1
        share = limits.budgets.astype(jnp.float32) / jnp.maximum(kv.num_live, 1).astype(jnp.float32)
        count = jnp.floor(length.astype(jnp.float32) * share[..., None] + 1e-5).astype(jnp.int32)
        if isinstance(self.share, Count):  # the same in exact numbers, while nothing of the prompt is gone
            lengths = np.arange(min(self.size, slots.ctx.site.prompt_len) + 1)
            exact = jnp.asarray(self.share.table(lengths, lengths), jnp.int32)[jnp.minimum(length, lengths[-1])]
            count = jnp.where((kv.num_live == slots.ctx.prompt_length[:, None])[..., None], exact, count)
        count = jnp.maximum(count, 1)
        chosen = jnp.put_along_axis(jnp.zeros_like(live), order, place - start < count, axis=-1, inplace=False)
        everything = (kv.num_live <= limits.budgets)[..., None]
        stays = live & (chosen | safe | everything)
        # Where chunks' shares hold less than one token, or than what is protected of them, others have less.
        keep = TopK(self.ties).best(jnp.where(safe, jnp.inf, score), jnp.where(stays, kv.pos, EMPTY), limits.budgets)
        return Selection(keep, score, limits.budgets)


@dataclasses.dataclass(frozen=True)
class LazyOrAll(Select):
    """A lazy layer keeps what is protected, another one its best (SimLayerKV, arXiv 2410.13846, section 3.2).

    A layer is lazy where the mean attention of the voting rows to protected tokens, over rows and heads, is above the
    threshold. Whether it is one depends on the prompt, and slots do not: what a lazy layer lets go stays allocated.

    Attributes:
      threshold: attention to protected tokens above which a layer is lazy; 1 is never exceeded.
      counted: in place of what is protected, attention counts to the first tokens and to the last before the voting
        rows: (first, last, voting rows), as in kvpress.
    """

    threshold: float
    counted: tuple[int, int, int] | None = None

    def __post_init__(self):
        settle(
            self,
            threshold=number("[0, 1]", "a share of the attention lies in [0, 1]"),
            counted=optional(each(tokens(), 3)),
        )

    @property
    def by_head(self) -> bool:
        """See `Select`."""
        return False

    def __call__(self, score, safe, slots, limits):
        """See `Select`."""
        kv = slots.kv
        summands = jnp.asarray(limits.summands, jnp.float32).reshape(-1, 1)
        counted = safe
        if self.counted is not None:
            first, last, rows = self.counted
            end = slots.ctx.length[:, None, None] - rows
            counted = (kv.pos < first) | ((kv.pos >= end - last) & (kv.pos < end))
        mass = (jnp.where(counted & kv.live, score, 0.0).sum(-1) / summands).mean(1)
        best = TopK().best(jnp.where(safe, jnp.inf, score), kv.pos, limits.budgets)
        lazy = (mass > self.threshold)[:, None, None]
        return Selection(jnp.where(lazy, safe & kv.live, best), score, limits.budgets)
