"""What most methods are: a score, a budget, and which tokens always stay."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.core.budgets import LONGEST, Even, Schedule
from kvjax.core.contract import (
    MOST,
    AttentionInputs,
    Context,
    Count,
    Decision,
    Heads,
    LayerInfo,
    LayerView,
    Layout,
    Observation,
    Part,
    PerHead,
    Phase,
    Policy,
    Prompts,
    Reads,
    Rewrite,
    Score,
    Select,
    Sizes,
    Slots,
    Stats,
    Tree,
    count,
    data,
    of_parts,
    resolve,
    unique,
    updated_parts,
)
from kvjax.core.decide.select import TopK

LARGE = 1e38  # what infinite scores become


class Evict(Policy):
    """Keeps the tokens with the best scores, within a budget.

    Attributes:
      score: ranks tokens.
      budget: live tokens of a kv head, the average over layers and heads: a number of tokens (int), a share of the
        prompt (float), or a function. Prompts so short that the share does not hold what must stay are kept whole.
      sinks, recent: how many first and last tokens always stay. They count against the budget.
      layers: how the budget is divided over layers: `(average "M", limit "M", num_layers) -> tokens "M L"`.
      heads: how a layer's budget is divided over its kv heads; None for equal parts.
      when: at which steps it evicts.
      select: which slots stay, given scores and budgets.
      rewrite: what kept slots hold afterwards; None for what they held.
      mask: what a decode row reads of the live slots: `(kv, inputs, ctx)` -> a mask "B K S", or indices of slots
        "B K R"; None for all.
      layout: how the layer is stored.

    Raises:
      ValueError: a budget below 1, a negative count, a share outside [0, 1], a score that is no `Score`, or a schedule
        that evicts before rows are read with parts that observe what rows read.
    """

    score: Score
    budget: Count = count()
    sinks: Count = count(default=0)
    recent: Count = count(default=0)
    layers: Callable[[Any, Any, int], Any] = data(default=Even())
    heads: Heads | None = None
    when: Schedule = Schedule()
    select: Select = TopK()
    rewrite: Rewrite | None = None
    mask: Callable[[LayerView, AttentionInputs, Context], Array] | None = None
    layout: Layout = Layout()

    def __post_init__(self):
        if not isinstance(self.score, Part):
            raise ValueError(
                f"score={self.score!r} is no Score; subclass it, or make a policy of a function by from_fn"
            )
        for n in (self.budget, self.sinks, self.recent):
            if not callable(n):
                resolve(n, np.ones(1, np.int64))
        if isinstance(self.budget, int) and self.budget < 1:
            raise ValueError(f"a budget of {self.budget} tokens is none; attention needs at least 1")
        if self.when.before and self._observed("decode"):
            raise ValueError(
                f"Schedule(before=True) evicts before rows are read, but {type(self.score).__name__} or another part "
                "observes what they read; leave out before"
            )

    # -------------------------------------------------------------------------------------------- on the host

    @property
    def writes(self) -> tuple[str, ...]:
        return () if self.rewrite is None else tuple(self.rewrite.writes)

    @property
    def _keeps_shares(self) -> bool:
        """Whether it remembers how many tokens each head got at the first eviction."""
        return self.when.decodes and self.heads is not None

    def _observed(self, phase: Phase) -> tuple[Observation, ...]:
        """What its parts observe."""
        parts: list[Part | None] = [self.score, self.select, self.heads, self.rewrite]
        return unique(o for part in parts if part is not None for o in part.observe(phase))

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        idle = not self.when.decodes and (phase == "decode" or not self.when.prefill)
        return () if idle else self._observed(phase)

    def sizes(self, info: LayerInfo, lengths: Prompts) -> Sizes:
        budget, sinks, recent = self._counts(info, lengths)
        outside = np.minimum(sinks + np.maximum(recent, self.when.before), budget)
        free, room = budget - outside, self.when.room(info.max_new_tokens)
        most = free if self.heads is None else self.heads.most(free, np.maximum(lengths - outside, 0), info)
        most = most + outside + self.select.slack
        most = most if self.when.prefill else np.maximum(most, info.prompt_len)
        head = np.minimum(info.prompt_len + info.max_new_tokens, most + room)
        total = np.minimum(info.num_kv_heads * head, info.num_kv_heads * (budget + room + self.select.slack))
        drop = resolve(self.when.drop, lengths, budget)
        counts = {"budget": budget, "sinks": sinks, "recent": recent, "drop": drop}
        own = {name: jnp.asarray(np.minimum(n, MOST), jnp.int32) for name, n in counts.items()}
        return Sizes(head, total, of_parts(self, lambda part: part.hparams(info, lengths, budget), **own))

    def _counts(self, info: LayerInfo, lengths: Prompts) -> tuple[Prompts, Prompts, Prompts]:
        """(budget, sinks, recent) of the layer. What always stays comes first; the rest is divided over layers."""
        n = np.append(lengths, LONGEST).astype(np.int64)
        average = np.clip(resolve(self.budget, n), 1, MOST)
        sinks, recent = resolve(self.sinks, n, average), resolve(self.recent, n, average)
        safe = sinks + np.maximum(recent, self.when.before)

        def divided(average: Prompts) -> Int[np.ndarray, "M L"]:
            outside = np.minimum(safe, average)
            limit = np.maximum(n - outside, average - outside)
            return self.layers(average - outside, limit, info.num_layers) + outside[:, None]

        budget = divided(average)
        wanted = lambda b: (self.score.least(n, b), self.select.least(n, b), resolve(self.when.drop, n, b))
        least = np.max([np.maximum.reduce([safe, *wanted(b)]) for b in budget.T], 0)
        short = budget.min(1) < least
        if short.any() and not short[-1]:  # a share holds `least` tokens of a long prompt: keep short ones whole
            budget = divided(np.where(short, np.maximum(n, least), average))
        if (wrong := (sinks + recent > budget.min(1)) & (n > budget.min(1)))[:-1].any():
            i = int(wrong.argmax())
            raise ValueError(
                f"a budget of {budget[i].min()} tokens cannot hold {sinks[i]} sinks and {recent[i]} recent tokens; "
                f"give a budget of {sinks[i] + recent[i]} or more, or keep fewer of them"
            )
        return np.minimum(budget[:-1, info.layer], info.prompt_len + info.max_new_tokens), sinks[:-1], recent[:-1]

    def memory(self, info: LayerInfo) -> Any:
        shares = {"shares": PerHead(dtype=jnp.int32)} if self._keeps_shares else {}
        return of_parts(self, lambda part: part.memory(info), **shares)

    def init_params(self, info: LayerInfo, key: Key[Array, ""]) -> Any:
        keys = iter(jax.random.split(key, 4))
        found = of_parts(self, lambda part: part.init_params(info, next(keys)))
        return found if jax.tree.leaves(found) else ()

    # ------------------------------------------------------------------------------------------------- traced

    def ranked(
        self, kv: LayerView, stats: Stats, ctx: Context, *, entering: bool = False, at_most_one: bool = False
    ) -> tuple[Slots, Float[Array, "B K S"], Int[Array, "B"]]:
        """What competes for the budget, with finite scores.

        Args:
          kv, stats, ctx: as for `update`.
          entering: whether a new row was stored that nothing has read yet; it stays.
          at_most_one: whether no head exceeds its budget by more than one token.

        Returns:
          The slots, their scores without a gradient, and how many tokens of each head are outside of the competition.
        """
        hparams = ctx.hparams
        first, last = hparams.sinks[:, None, None], (ctx.length - hparams.recent)[:, None, None]
        newest = kv.pos == ctx.length[:, None, None] - 1 if entering else False
        protected = kv.live & ((kv.pos < first) | (kv.pos >= last) | newest)
        slots = self._slots(kv, stats, ctx, protected, at_most_one)
        score = self.score(slots.of("score")).astype(jnp.float32)
        score = jnp.nan_to_num(score, nan=-LARGE, posinf=LARGE, neginf=-LARGE)
        if ctx.window is not None:  # tokens outside the window are evicted first
            score = jnp.where(kv.pos > (ctx.length - entering - ctx.window)[:, None, None], score, -LARGE)
        return slots, lax.stop_gradient(score), self._outside(ctx)

    def _slots(
        self, kv: LayerView, stats: Stats, ctx: Context, protected: Bool[Array, "B K S"], at_most_one: bool = False
    ) -> Slots:
        memory, hparams, params = kv.memory, ctx.hparams, ctx.params
        return Slots(kv, stats, ctx, kv.live & ~protected, protected, memory, hparams, params, at_most_one)

    def _outside(self, ctx: Context) -> Int[Array, "B"]:
        """Tokens that each head keeps in any case."""
        hparams = ctx.hparams
        return jnp.minimum(hparams.sinks + jnp.maximum(hparams.recent, self.when.before), hparams.budget)

    def choose(
        self,
        kv: LayerView,
        stats: Stats,
        ctx: Context,
        shares: Int[Array, "B K"] | None = None,
        *,
        entering: bool = False,
        drop: Int[Array, "B 1"] | None = None,
        at_most_one: bool = False,
    ) -> tuple[Decision, Int[Array, "B _"]]:
        """What stays, and each head's share: the tokens that it got beside those that stay in any case.

        Args:
          kv, stats, ctx: as for `update`.
          shares: of an earlier eviction, or as the layer was given them; None to divide the budget now.
          entering, at_most_one: as for `ranked`.
          drop: the fewest tokens that a head loses.
        """
        slots, score, outside = self.ranked(kv, stats, ctx, entering=entering, at_most_one=at_most_one)
        if shares is None:
            average = ctx.hparams.budget - outside
            shares = average[:, None] if self.heads is None else self.heads(score, average, slots.of("heads"))
        budgets = jnp.broadcast_to(shares + outside[:, None], kv.pos.shape[:2])
        if drop is not None:
            least = jnp.minimum(slots.protected.sum(-1), budgets)
            budgets = jnp.maximum(jnp.minimum(budgets, kv.num_live - drop), least)
        decision = Decision(self.select(score, budgets, slots.of("select")), score, budgets)
        return (decision if self.rewrite is None else self.rewrite(decision, slots.of("rewrite"))), shares

    def updated(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        """The layer after its parts' memory was updated by the rows just read."""
        slots = self._slots(kv, stats, ctx, jnp.zeros_like(kv.live))
        return kv.replace(memory=updated_parts(self, slots))

    def update(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        if ctx.phase == "decode" and not self.when.decodes:
            return kv
        kv = self.updated(kv, stats, ctx)
        if ctx.phase == "decode":
            return kv if self.when.before else self._after_step(kv, stats, ctx)
        if not (self.when.prefill or self._keeps_shares):
            return kv
        decision, shares = self.choose(kv, stats, ctx)
        if self._keeps_shares:
            kv = kv.replace(memory=Tree(**{**vars(kv.memory), "shares": jnp.broadcast_to(shares, kv.pos.shape[:2])}))
        return apply_decision(kv, decision) if self.when.prefill else kv

    def _after_step(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        """The layer after a decode step, of whose heads those evict that are due."""
        shares = getattr(kv.memory, "shares", None)
        if self.when.every == 1:
            one = self.when.prefill and ctx.steady
            return apply_decision(kv, self.choose(kv, stats, ctx, shares, at_most_one=one)[0])
        due, drop = self._due(kv, stats, ctx, shares)
        changes = lambda kv: {name: getattr(kv, name) for name in ("pos", *self.writes)}
        evicted = lambda: changes(apply_decision(kv, self.choose(kv, stats, ctx, shares, drop=drop)[0]))
        new = lax.cond(due.any(), evicted, lambda: changes(kv))
        pick = lambda x, y: jnp.where(due.reshape(due.shape + (1,) * (x.ndim - 2)), x, y)
        return kv.replace(**jax.tree.map(pick, new, changes(kv)))

    def _due(
        self, kv: LayerView, stats: Stats, ctx: Context, shares: Int[Array, "B K"] | None
    ) -> tuple[Bool[Array, "B K"], Int[Array, "B 1"] | None]:
        """(which heads evict at this step, the fewest tokens that they lose)."""
        if self.when.every is not None:
            return jnp.broadcast_to((ctx.step % self.when.every == 0)[:, None], kv.pos.shape[:2]), None
        budgets = ctx.hparams.budget[:, None] if shares is None else shares + self._outside(ctx)[:, None]
        return kv.num_live >= budgets + (self.when.over or 0), ctx.hparams.drop[:, None]

    def enter(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> LayerView:
        if not self.when.before or ctx.phase != "decode":
            return kv
        return apply_decision(kv, self.choose(kv, {}, ctx, entering=True, at_most_one=True)[0])

    def reads(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> Reads | None:
        return None if self.mask is None or inputs.q.shape[2] > 1 else Reads(self.mask(kv, inputs, ctx))

    def reserve(self, kv: LayerView, ctx: Context) -> Int[Array, "B K"]:
        room = jnp.minimum(ctx.max_new_tokens, self.when.room(MOST))
        kept = kv.num_live
        if self.when.decodes:
            budgets = ctx.hparams.budget[:, None]
            if self._keeps_shares:
                budgets = kv.memory.shares + self._outside(ctx)[:, None]
            kept = jnp.maximum(budgets + self.select.slack, 0 if self.when.prefill else kept)
        return jnp.minimum(kept + room[:, None], (ctx.prompt_length + ctx.max_new_tokens)[:, None])


def apply_decision(kv: LayerView, decision: Decision) -> LayerView:
    """The layer after a decision: slots that stay, and what they hold.

    Raises:
      ValueError: the decision gives a field that the layer's policy does not list in `writes`.
    """
    written = {n: x for n in ("k", "v", "log_weight") if (x := getattr(decision, n)) is not None}
    if wrong := sorted(set(written) - set(kv.how.writes)):
        raise ValueError(
            f"a decision gives {wrong[0]}, but its policy writes {kv.how.writes or 'nothing'}; "
            f"list {wrong[0]!r} in `writes` of the part that gives it"
        )
    return kv.keep(decision.keep).replace(**{n: x.astype(getattr(kv, n).dtype) for n, x in written.items()})
