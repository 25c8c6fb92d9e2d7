"""What most methods are: a score, a budget, and which tokens always stay."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.core.budgets import LONGEST, Even, Schedule
from kvjax.core.contract import (
    MOST,
    Count,
    Decision,
    Layout,
    Part,
    PerHead,
    Policy,
    Reads,
    Sizes,
    Slots,
    Tree,
    count,
    data,
    of_parts,
    resolve,
    unique,
    updated_parts,
)
from kvjax.core.decide.select import Select, TopK
from kvjax.core.scores.attention import Score


class Evict(Policy):
    """Keeps the best-scored tokens within a budget.

    Attributes:
      score: ranks tokens.
      budget: live tokens of a kv head, on average: a number (int), a share of the prompt (float), or a function.
      sinks, recent: first and last tokens that always stay; they count against the budget.
      layers, heads: how the budget is divided over layers, and over a layer's heads (None for equal parts).
      when: at which steps.
      select: which slots stay, given scores and budgets.
      rewrite: what kept slots hold afterwards: `(decision, slots) -> decision`; None for what they held.
      mask: what a decode row reads, `(kv, inputs, ctx) -> "B K S"`; None for all.
    """

    score: Score
    budget: Count = count()
    sinks: Count = count(default=0)
    recent: Count = count(default=0)
    layers: Any = data(default=Even())
    heads: Part | None = None
    when: Schedule = Schedule()
    select: Select = TopK()
    rewrite: Part | None = None
    mask: Any = None
    layout: Layout = Layout()

    def __post_init__(self):
        for n in (self.budget, self.sinks, self.recent):
            if not callable(n):
                resolve(n, np.ones(1, np.int64))

    # -------------------------------------------------------------------------------------------- on the host

    @property
    def writes(self) -> tuple:
        """See `Policy`."""
        return () if self.rewrite is None else tuple(self.rewrite.writes)

    def _counts(self, info, lengths):
        """(budget, sinks, recent) "M" of the layer. Safe tokens come first; what is left is divided over layers."""
        n = np.append(lengths, LONGEST).astype(np.int64)
        average = np.clip(resolve(self.budget, n), 1, MOST)
        sinks, recent = resolve(self.sinks, n, average), resolve(self.recent, n, average)
        safe = sinks + np.maximum(recent, self.when.before)

        def divided(average):
            outside = np.minimum(safe, average)
            limit = np.maximum(n - outside, average - outside)
            return self.layers(average - outside, limit, info.num_layers) + outside[:, None]

        budget = divided(average)
        wanted = lambda b: (self.score.least(n, b), self.select.least(n, b), resolve(self.when.drop, n, b))
        least = np.max([np.maximum.reduce([safe, *wanted(b)]) for b in budget.T], 0)
        short = budget.min(1) < least
        if short.any() and not short[-1]:  # a share of so short a prompt holds nothing but what is safe: keep it whole
            budget = divided(np.where(short, np.maximum(n, least), average))
        if (wrong := (sinks + recent > budget.min(1)) & (n > budget.min(1)))[:-1].any():
            i = int(wrong.argmax())
            raise ValueError(
                f"a budget of {budget[i].min()} tokens cannot hold {sinks[i]} sinks and {recent[i]} recent tokens"
            )
        return np.minimum(budget[:-1, info.layer], info.prompt_len + info.max_new_tokens), sinks[:-1], recent[:-1]

    def sizes(self, info, lengths):
        """See `Policy`."""
        budget, sinks, recent = self._counts(info, lengths)
        outside = np.minimum(sinks + np.maximum(recent, self.when.before), budget)
        free, room = budget - outside, self.when.room(info.max_new_tokens)
        most = free if self.heads is None else self.heads.most(free, np.maximum(lengths - outside, 0), info)
        most = most + outside + self.select.slack
        most = most if self.when.prefill else np.maximum(most, info.prompt_len)
        head = np.minimum(info.prompt_len + info.max_new_tokens, most + room)
        total = np.minimum(info.num_kv_heads * head, info.num_kv_heads * (budget + room + self.select.slack))
        whole = lambda x: jnp.asarray(np.minimum(x, MOST), jnp.int32)
        own = dict(
            zip(
                ("budget", "sinks", "recent", "drop"),
                map(whole, (budget, sinks, recent, resolve(self.when.drop, lengths, budget))),
            )
        )
        return Sizes(head, total, of_parts(self, lambda part: part.hparams(info, lengths, budget), **own))

    def observe(self, phase):
        """See `Policy`."""
        idle = not self.when.decodes and (phase == "decode" or not self.when.prefill)
        parts = [part for part in (self.score, self.select, self.heads, self.rewrite) if part is not None]
        return () if idle else unique(o for part in parts for o in part.observe(phase))

    @property
    def _shares(self) -> bool:
        return self.when.decodes and self.heads is not None

    def memory(self, info):
        """See `Policy`: that of its parts and, while it evicts decoding, the heads' shares."""
        shares = {"shares": PerHead(dtype=jnp.int32)} if self._shares else {}
        return of_parts(self, lambda part: part.memory(info), **shares)

    def init_params(self, info, key):
        """See `Policy`."""
        keys = iter(jax.random.split(key, 4))
        found = of_parts(self, lambda part: part.init_params(info, next(keys)))
        return found if jax.tree.leaves(found) else ()

    # ------------------------------------------------------------------------------------------------- traced

    def _slots(self, kv, stats, ctx, protected, **more) -> Slots:
        return Slots(kv, stats, ctx, kv.live & ~protected, protected, kv.memory, ctx.hparams, ctx.params, **more)

    def ranked(self, kv, stats, ctx, entering=False, **more):
        """What competes for the budget: (slots, scores without infinities, tokens "B" that every head has anyway)."""
        hparams = ctx.hparams
        first, last = hparams.sinks[:, None, None], (ctx.length - hparams.recent)[:, None, None]
        newest = kv.pos == ctx.length[:, None, None] - 1 if entering else False
        slots = self._slots(kv, stats, ctx, kv.live & ((kv.pos < first) | (kv.pos >= last) | newest), **more)
        score = jnp.nan_to_num(self.score(slots.of("score")).astype(jnp.float32), nan=-1e38, posinf=1e38, neginf=-1e38)
        if ctx.window is not None:  # what no later row can read goes first
            score = jnp.where(kv.pos > (ctx.length - entering - ctx.window)[:, None, None], score, -1e38)
        outside = jnp.minimum(hparams.sinks + jnp.maximum(hparams.recent, self.when.before), hparams.budget)
        return slots, lax.stop_gradient(score), outside

    def choose(self, kv, stats, ctx, shares=None, entering=False, drop=None, **more) -> tuple[Decision, Any]:
        """What stays, and how many tokens "B K" each head got beside those that every head has anyway."""
        slots, score, outside = self.ranked(kv, stats, ctx, entering, **more)
        if shares is None:
            average = ctx.hparams.budget - outside
            shares = average[:, None] if self.heads is None else self.heads(score, average, slots.of("heads"))
        budgets = jnp.broadcast_to(shares + outside[:, None], kv.pos.shape[:2])
        if drop is not None:
            least = jnp.minimum(slots.protected.sum(-1), budgets)
            budgets = jnp.maximum(jnp.minimum(budgets, kv.num_live - drop), least)
        decision = Decision(self.select(score, budgets, slots.of("select")), score, budgets)
        return (decision if self.rewrite is None else self.rewrite(decision, slots.of("rewrite"))), shares

    def updated(self, kv, stats, ctx):
        """The layer whose memory holds the rows just read."""
        slots = self._slots(kv, stats, ctx, jnp.zeros_like(kv.live))
        return kv.replace(memory=updated_parts(self, slots))

    def update(self, kv, stats, ctx):
        """See `Policy`."""
        if ctx.phase == "decode" and not self.when.decodes:
            return kv
        kv = self.updated(kv, stats, ctx)
        if ctx.phase == "decode":
            return kv if self.when.before else self._step(kv, stats, ctx)
        if not (self.when.prefill or self._shares):
            return kv
        decision, shares = self.choose(kv, stats, ctx)
        if self._shares:
            kv = kv.replace(memory=Tree(**{**vars(kv.memory), "shares": jnp.broadcast_to(shares, kv.pos.shape[:2])}))
        return apply_decision(kv, decision) if self.when.prefill else kv

    def _step(self, kv, stats, ctx):
        shares = getattr(kv.memory, "shares", None)
        if self.when.every == 1:
            return apply_decision(
                kv, self.choose(kv, stats, ctx, shares, at_most_one=self.when.prefill and ctx.steady)[0]
            )
        if self.when.every is not None:
            due, drop = jnp.broadcast_to((ctx.step % self.when.every == 0)[:, None], kv.pos.shape[:2]), None
        else:
            budgets = (
                ctx.hparams.budget[:, None] if shares is None else shares + self.ranked(kv, stats, ctx)[2][:, None]
            )
            due, drop = kv.num_live >= budgets + self.when.over, ctx.hparams.drop[:, None]
        held = lambda kv: {n: getattr(kv, n) for n in ("pos", *self.writes)}
        new = lax.cond(
            due.any(),
            lambda: held(apply_decision(kv, self.choose(kv, stats, ctx, shares, drop=drop)[0])),
            lambda: held(kv),
        )
        pick = lambda x, y: jnp.where(due.reshape(due.shape + (1,) * (x.ndim - 2)), x, y)
        return kv.replace(**jax.tree.map(pick, new, held(kv)))

    def enter(self, kv, inputs, ctx):
        """See `Policy`."""
        if not self.when.before or ctx.phase != "decode":
            return kv
        return apply_decision(kv, self.choose(kv, {}, ctx, entering=True, at_most_one=True)[0])

    def reads(self, kv, inputs, ctx):
        """See `Policy`."""
        return None if self.mask is None or inputs.q.shape[2] > 1 else Reads(self.mask(kv, inputs, ctx))

    def reserve(self, kv, ctx):
        """See `Policy`."""
        room = self.when.room(math.inf)
        room = jnp.minimum(ctx.max_new_tokens, ctx.width + 2**20 if room == math.inf else room)
        kept, n = kv.num_live, ctx.hparams
        if self.when.decodes:
            budgets = n.budget[:, None]
            if self._shares:
                budgets = (
                    kv.memory.shares + jnp.minimum(n.sinks + jnp.maximum(n.recent, self.when.before), n.budget)[:, None]
                )
            kept = jnp.maximum(budgets + self.select.slack, 0 if self.when.prefill else kept)
        return jnp.minimum(kept + room[:, None], (ctx.prompt_length + ctx.max_new_tokens)[:, None])


def apply_decision(kv, decision: Decision):
    """The layer after a decision."""
    written = {n: x for n in ("k", "v", "log_weight") if (x := getattr(decision, n)) is not None}
    if wrong := sorted(set(written) - set(kv.how.writes)):
        raise ValueError(f"a decision gives {wrong[0]}, which its policy does not list in `writes`")
    return kv.keep(decision.keep).replace(**{n: x.astype(getattr(kv, n).dtype) for n, x in written.items()})
