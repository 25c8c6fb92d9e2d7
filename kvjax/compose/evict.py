"""`Evict`, made of a score, a budget, and tokens that always stay."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from kvjax.budgets import LONGEST, Even, OfSeen, Schedule
from kvjax.compose.around import Coded, inside
from kvjax.contract import (
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
    children,
    count,
    data,
    of_parts,
    resolve,
    unique,
    updated_parts,
)
from kvjax.decide.select import TopK
from kvjax.pallas_kernels.pytree import described
from kvjax.scores.attention import Recency
from kvjax.storage import Storage
from kvjax.storage.codes import rows_of

LARGE = 1e38  # what infinite scores become
_WRITTEN = "k", "v", "log_weight"  # what a decision may give beside the slots that stay


class Evict(Policy):
    """Keeps the tokens with the best scores, within a budget.

    Attributes:
      score: ranks tokens.
      budget: live tokens of a kv head, the average over layers and heads: a number of tokens (int), a share of the
        prompt (float), or a function. Prompts so short that the share does not hold what must stay are kept whole.
      sinks, recent: how many first and last tokens always stay, 1.0 sinks being all of the prompt. They count against
        the budget.
      layers: how the budget is divided over layers: `(average "M", limit "M", num_layers, outside "M") -> "M L"`,
        where average, limit and result are tokens beside the `outside` ones that every layer keeps in any case.
      heads: how a layer's budget is divided over its kv heads; None for equal parts.
      when: at which steps it evicts.
      select: which slots stay, given scores and budgets.
      rewrite: what kept slots hold afterwards; None for what they held.
      mask: what a decode row reads of the live slots: `(kv, inputs, ctx)` -> a mask "B K S", or indices of slots
        "B K R"; None for all.
      layout: how the layer is stored. `sinks` first tokens are shifted, where it shifts any.

    Raises:
      ValueError: a budget of nothing, a negative count, a share outside [0, 1], a field that is not of its kind;
        shifted tokens where others stay than a number of first ones and the last ones; a
        schedule that evicts before rows are read with parts that observe what rows read, or while decoding by a score
        that observes prompts alone.
    """

    score: Score
    budget: Count = count()
    sinks: Count = count(default=0)
    recent: Count = count(default=0)
    layers: Callable[[Prompts, Prompts, int, Prompts], Int[np.ndarray, "M L"]] = data(default=Even())
    heads: Heads | None = None
    when: Schedule = Schedule()
    select: Select = TopK()
    rewrite: Rewrite | None = None
    mask: Callable[[LayerView, AttentionInputs, Context], Array] | None = None
    layout: Layout = Layout()

    def __post_init__(self):
        for part in (self.select, self.rewrite):
            own = () if part is None else part.writes
            if not isinstance(own, tuple) or {*own} - {*_WRITTEN}:
                raise ValueError(
                    f"{type(part).__name__}.writes={own!r} is no tuple of some of {_WRITTEN}; give one, such as ('v',)"
                )
        if not callable(self.budget) and self.budget <= 0:
            what = "of the prompt" if isinstance(self.budget, float) else "tokens"
            raise ValueError(f"a budget of {self.budget} {what} is none; attention needs at least 1 token")
        if isinstance(self.budget, OfSeen) and not (self.when.decodes and self.heads is None and self.layers == Even()):
            raise ValueError(
                f"{self.budget} grows while decoding, in all layers and heads alike, but {self.when} is given with "
                f"layers={self.layers} and heads={self.heads}; give a schedule that evicts while decoding, such as "
                "Schedule(every=16), layers=Even() and heads=None"
            )
        if self.when.decodes and (part := _of_prompts(self.score)):
            raise ValueError(
                f"{type(part).__name__} ranks by what it observes of prompts alone, but {self.when} evicts while "
                "decoding; use Schedule(), or a score that observes decode rows, such as Accumulated"
            )
        if self.layout.positions == "shifted":  # the sinks are, where they and the last tokens are all that stays
            if self.score != Recency() or type(self.select) is not TopK or not isinstance(self.sinks, int | np.integer):
                raise ValueError(
                    'positions="shifted" is for a number of first tokens and the last ones: TopK by Recency, but here '
                    f"are {type(self.select).__name__} by {type(self.score).__name__} and sinks={self.sinks!r}; use "
                    '"rank"'
                )
            object.__setattr__(self, "layout", dataclasses.replace(self.layout, sinks=int(self.sinks)))
        if self.when.before and self.observe("decode"):
            raise ValueError(
                f"Schedule(before=True) evicts before rows are read, but {type(self.score).__name__} or another part "
                "observes what they read; leave out before"
            )

    # -------------------------------------------------------------------------------------------- on the host

    @property
    def writes(self) -> tuple[str, ...]:
        return unique((*self.select.writes, *(() if self.rewrite is None else self.rewrite.writes)))

    @property
    def _keeps_shares(self) -> bool:
        """Whether the share of each head at the first eviction is remembered."""
        return self.when.decodes and self.heads is not None

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        if not self.when.decodes and (phase == "decode" or not self.when.prefill):
            return ()
        parts: list[Part | None] = [self.score, self.select, self.heads, self.rewrite]
        return unique(o for part in parts if part is not None for o in part.observe(phase))

    def sizes(self, info: LayerInfo, lengths: Prompts) -> Sizes:
        budget, sinks, recent = self._counts(info, lengths)
        outside = np.minimum(sinks + np.maximum(recent, int(self.when.before)), budget)
        free, room, slack = budget - outside, self.when.room(info.max_new_tokens), self.select.slack
        waits = (lengths <= budget) | (not self.when.prefill)  # the first eviction comes while decoding
        held = np.where(waits & self._keeps_shares, np.maximum(lengths, budget) + room, lengths)
        most = free if self.heads is None else self.heads.most(free, np.maximum(held - outside, 0), info)
        most = most + outside + slack
        most = most if self.when.prefill else np.maximum(most, info.prompt_len)
        head = np.minimum(info.prompt_len + info.max_new_tokens, most + room)
        grows = self._keeps_shares & (np.maximum(lengths, budget) + slack < most)  # some heads beyond what they had
        each = np.where(grows | (not self.when.prefill), head, np.minimum(head, budget + room + slack))
        total = info.num_kv_heads * each
        drop = resolve(self.when.drop, lengths, budget)
        counts = {"budget": budget, "sinks": sinks, "recent": recent, "drop": drop}
        own: dict[str, np.ndarray] = {name: np.minimum(n, MOST).astype(np.int32) for name, n in counts.items()}
        if isinstance(self.budget, OfSeen):
            self.budget.check(lengths, info.max_new_tokens)
            own["share"] = np.full(len(lengths), self.budget.share, np.float32)
        return Sizes(head, total, of_parts(self, lambda part: part.hparams(info, lengths, budget), **own))

    def _counts(self, info: LayerInfo, lengths: Prompts) -> tuple[Prompts, Prompts, Prompts]:
        """(budget, sinks, recent) of the layer. What always stays comes first; the rest is divided over layers."""
        n = np.append(lengths, LONGEST).astype(np.int64)
        average = np.clip(resolve(self.budget, n), 1, MOST)
        sinks, recent = resolve(self.sinks, n, average), resolve(self.recent, n, average)
        safe, page = sinks + np.maximum(recent, int(self.when.before)), self.select.page

        def divided(average: Prompts) -> Int[np.ndarray, "M L"]:
            outside = np.minimum(safe, average)
            limit = np.maximum(n - outside, average - outside)
            return self.layers(average - outside, limit, info.num_layers, outside) + outside[:, None]

        budget = divided(average)
        least = np.max([np.maximum(safe + page, self._least(n, b)) for b in budget.T], 0)
        short = budget.min(1) < least
        if short.any() and not short[-1]:  # a share holds `least` tokens of a long prompt: keep short ones whole
            budget = divided(np.where(short, np.maximum(n, least), average))
        most = n + info.max_new_tokens * self.when.decodes
        if (wrong := (safe + page > budget.min(1)) & (most > budget.min(1)))[:-1].any():
            i = int(wrong.argmax())
            if safe[i] <= budget[i].min():
                raise ValueError(
                    f"a budget of {budget[i].min()} tokens holds no page of {page} beside {safe[i]} tokens that stay; "
                    f"give a budget of {safe[i] + page} or more, or smaller pages"
                )
            pinned = isinstance(self.sinks, float) and self.sinks == 1
            first = f"a prompt of {sinks[i]} that stays" if pinned else f"{sinks[i]} sinks"
            fix = "" if pinned else ", or keep fewer of them"
            raise ValueError(
                f"a budget of {budget[i].min()} tokens cannot hold {first} and {safe[i] - sinks[i]} recent tokens; "
                f"give a budget of {min(safe[i], most[i])} or more{fix}"
            )
        return np.minimum(budget[:-1, info.layer], info.prompt_len + info.max_new_tokens), sinks[:-1], recent[:-1]

    def least(self, info: LayerInfo, lengths: Prompts) -> Prompts:
        """The smallest budget that it can work with in a layer, in tokens."""
        return self._least(lengths, self._counts(info, lengths)[0])

    def _least(self, lengths: Prompts, budget: Prompts) -> Prompts:
        parts = self.score.least(lengths, budget), self.select.least(lengths, budget)
        return np.maximum.reduce([*parts, resolve(self.when.drop, lengths, budget)])

    def memory(self, info: LayerInfo) -> PyTree:
        shares = {"shares": PerHead(dtype=jnp.int32, fill=-1)} if self._keeps_shares else {}
        return of_parts(self, lambda part: part.memory(info), **shares)

    def init_params(self, info: LayerInfo, key: Key[Array, ""]) -> PyTree:
        keys = iter(jax.random.split(key, 4))
        found = of_parts(self, lambda part: part.init_params(info, next(keys)))
        return found if jax.tree.leaves(found) else ()

    # ------------------------------------------------------------------------------------------------- traced

    def ranked(
        self, kv: LayerView, stats: Stats, ctx: Context, at_most_one: bool = False
    ) -> tuple[Slots, Float[Array, "B K S"], Bool[Array, "B K"]]:
        """The slots, with finite scores of all candidates.

        Args:
          kv, stats, ctx: as for `update`; or for `enter`, of which the new row, that nothing has read yet, stays.
          at_most_one: whether no head exceeds its budget by more than one token.

        Returns:
          The slots, their scores without a gradient, and heads of which no candidate's score is a number.
        """
        hparams, entering = ctx.hparams, self.when.before and ctx.phase == "decode"
        first, last = hparams.sinks[:, None, None], (ctx.length - hparams.recent)[:, None, None]
        newest = kv.pos == ctx.length[:, None, None] - 1 if entering else False
        protected = kv.live & ((kv.pos < first) | (kv.pos >= last) | newest)
        slots = Slots(kv, stats, ctx, kv.live & ~protected, protected, kv.memory, hparams, ctx.params, at_most_one)
        score = self.score(slots.of("score"))
        if getattr(score, "shape", None) != kv.pos.shape or jnp.iscomplexobj(score):
            raise _misshapen(self.score, "scores", score, kv, 'one a slot, "B K S"')
        score = score.astype(jnp.float32)
        unscored = ~(slots.candidates & ~jnp.isnan(score)).any(-1)
        score = jnp.nan_to_num(score, nan=-LARGE, posinf=LARGE, neginf=-LARGE)
        if ctx.window is not None:  # tokens outside the window are evicted first
            score = jnp.where(kv.pos > (ctx.length - int(entering) - ctx.window)[:, None, None], score, -LARGE)
        return slots, lax.stop_gradient(score), unscored

    def _now(self, ctx: Context) -> Context:
        """The moment with the budget of the tokens read so far, where it grows."""
        own = vars(ctx.hparams)
        if "share" not in own:
            return ctx
        read = jnp.maximum(ctx.length, ctx.prompt_length).astype(jnp.float32)
        share = jnp.floor(read * own["share"] * (1 + 4e-7) + 1e-6).astype(jnp.int32)
        least = own["sinks"] + jnp.maximum(own["recent"], 1)
        budget = jnp.minimum(jnp.maximum(share, least), own["budget"])
        return dataclasses.replace(ctx, hparams=Tree(**{**own, "budget": budget}))

    def outside(self, ctx: Context) -> Int[Array, "B"]:
        """Tokens that each head keeps in any case."""
        hparams = ctx.hparams
        return jnp.minimum(hparams.sinks + jnp.maximum(hparams.recent, int(self.when.before)), hparams.budget)

    def choose(
        self, kv: LayerView, stats: Stats, ctx: Context, shares: Int[Array, "B K"] | None = None
    ) -> tuple[Decision, Int[Array, "B _"]]:
        """The decision, and each head's share from now on, below 0 where the first eviction is to set it.

        Args:
          kv, stats, ctx: as for `ranked`.
          shares: the tokens that each head gets beside those that stay in any case; None to divide the budget now.
        """
        steady = ctx.phase == "decode" and self.when.every == 1 and self.when.prefill and ctx.steady
        slots, score, unscored = self.ranked(kv, stats, ctx, steady and (shares is not None or not self._keeps_shares))
        now, later = self._divided(score, slots) if shares is None else (shares, shares)
        budgets = jnp.broadcast_to(now + self.outside(ctx)[:, None], kv.pos.shape[:2])
        if self.when.over is not None and ctx.phase == "decode":  # a head that evicts loses so many at least
            budgets = jnp.clip(kv.num_live - ctx.hparams.drop[:, None], 0, budgets)
        keep = self.select(score, budgets, slots.of("select"))
        gates = "log_weight" in self.select.writes and jnp.issubdtype(getattr(keep, "dtype", bool), jnp.floating)
        if getattr(keep, "shape", None) != kv.pos.shape or not (gates or keep.dtype == bool):
            need = 'bool of shape (B, K, S), or numbers from 0 to 1 and "log_weight" in `writes`'
            raise _misshapen(self.select, "masks", keep, kv, need)
        whole, some, weight = keep, keep, None
        if keep.dtype != bool:  # gates: how much of each slot stays
            whole, some, weight = keep >= 1, keep > 0, jnp.log(jnp.maximum(keep, jnp.finfo(keep.dtype).tiny))
            keep = kv.live
        else:  # whatever the selection says, what is protected stays, where the budget holds it
            fits = ctx.hparams.sinks + jnp.maximum(ctx.hparams.recent, int(self.when.before)) <= ctx.hparams.budget
            keep = whole = some = keep | (slots.protected & fits[:, None, None])
        goes, chosen = (kv.live & ~whole).any(-1), (slots.candidates & some).any(-1)
        if self.heads is not None or shares is not None:  # scores decide too how much a head gets
            chosen = chosen | (ctx.hparams.budget > self.outside(ctx))[:, None]
        unscored = unscored & goes & chosen if ctx.phase == "prefill" else None
        decision = Decision(keep, score, budgets, log_weight=weight, unscored=unscored)
        if self.rewrite is None:
            return decision, later
        if not isinstance(found := self.rewrite(decision, slots.of("rewrite")), Decision):
            raise ValueError(
                f"{type(self.rewrite).__name__} gives {described(found)}, not a Decision; give "
                "dataclasses.replace(decision, v=...)"
            )
        return found, later

    def _divided(self, score: Float[Array, "B K S"], slots: Slots) -> tuple[Int[Array, "B _"], Int[Array, "B _"]]:
        """The shares of heads at this eviction and at later ones, below 0 until something is evicted."""
        ctx, outside = slots.ctx, self.outside(slots.ctx)
        average = ctx.hparams.budget - outside
        if self.heads is None:
            return average[:, None], average[:, None]
        found = self.heads(score, average, slots.of("heads"))
        if not self._keeps_shares:
            return found, found
        before, goes = slots.memory.shares, (slots.kv.num_live > found + outside[:, None]).any(-1, keepdims=True)
        lasting = self.heads.lasting(found, average, slots.of("heads"))
        if ctx.phase == "prefill":  # heads that may yet grow, at the cost of others, get their shares afterwards
            return found, jnp.where(goes & (lasting == found).all(-1, keepdims=True), found, before)
        later = jnp.where((before < 0) & goes, lasting, before)
        return jnp.where(later < 0, found, later), later

    def update_memory(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        """The layer after its parts' memory was updated by the rows just read."""
        slots = Slots(kv, stats, ctx, kv.live, jnp.zeros_like(kv.live), kv.memory, ctx.hparams, ctx.params)
        return kv.replace(memory=updated_parts(self, slots))

    def update(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        if ctx.phase == "decode" and not self.when.decodes:
            return kv
        kv, ctx = self.update_memory(kv, stats, ctx), self._now(ctx)
        if ctx.phase == "decode":
            return kv if self.when.before else self._after_step(kv, stats, ctx)
        return self._evicted(kv, stats, ctx) if self.when.prefill else kv

    def _evicted(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        """The layer after an eviction."""
        if not self._keeps_shares:
            return apply_decision(kv, self.choose(kv, stats, ctx)[0])
        if ctx.phase == "prefill":
            decision, shares = self.choose(kv, stats, ctx)
        else:
            before, budget = kv.memory.shares, ctx.hparams.budget[:, None]
            here = jnp.where(before < 0, budget - self.outside(ctx)[:, None], before)
            same = lambda: (self.choose(kv, stats, ctx, here)[0], before)
            anew = ((before < 0) & (kv.num_live > budget)).any()
            decision, shares = lax.cond(anew, lambda: self.choose(kv, stats, ctx), same)
        return _with_shares(apply_decision(kv, decision), shares)

    def _after_step(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        """The layer after a decode step; only heads that are due evict."""
        if self.when.every == 1:
            return self._evicted(kv, stats, ctx)
        due = self._due(kv, ctx)
        own = {"shares": kv.memory.shares} if self._keeps_shares else {}
        now = {name: getattr(kv, name) for name in ("pos", *self.writes)} | own

        def evicted() -> dict[str, Array]:
            found = self._evicted(kv, stats, ctx)
            return {name: getattr(found.memory if name == "shares" else found, name) for name in now}

        new = lax.cond(due.any(), evicted, lambda: now)
        if own:  # all heads of a sequence meet new shares
            rows = due.any(-1, keepdims=True)
            due = due | (rows & (now["shares"] < 0) & (new["shares"] >= 0))
            kv = _with_shares(kv, jnp.where(rows, new.pop("shares"), now.pop("shares")))
        pick = lambda x, y: jnp.where(due.reshape(due.shape + (1,) * (x.ndim - 2)), x, y)
        return kv.replace(**jax.tree.map(pick, new, now))

    def _budgets(self, kv: LayerView, ctx: Context) -> Int[Array, "B _"]:
        """The budget of each head while decoding; the average until something is evicted."""
        budget = ctx.hparams.budget[:, None]
        if not self._keeps_shares:
            return budget
        return jnp.where(kv.memory.shares < 0, budget, kv.memory.shares + self.outside(ctx)[:, None])

    def _due(self, kv: LayerView, ctx: Context) -> Bool[Array, "B K"]:
        """Which heads evict at this step."""
        if self.when.every is not None:
            return jnp.broadcast_to((ctx.step % self.when.every == 0)[:, None], kv.pos.shape[:2])
        return kv.num_live >= self._budgets(kv, ctx) + (self.when.over or 0)

    def enter(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> LayerView:
        return self._evicted(kv, Stats(), self._now(ctx)) if self.when.before and ctx.phase == "decode" else kv

    def reads(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> Reads | None:
        return None if self.mask is None or inputs.q.shape[2] > 1 else Reads(self.mask(kv, inputs, ctx))

    def reserve(self, kv: LayerView, ctx: Context) -> Int[Array, "B K"]:
        room = jnp.minimum(ctx.max_new_tokens, self.when.room(MOST))
        kept = kv.num_live
        if self.when.decodes:
            least = kept if self._keeps_shares or not self.when.prefill else 0
            kept = jnp.maximum(self._budgets(kv, ctx) + self.select.slack, least)
        return jnp.minimum(kept + room[:, None], (ctx.prompt_length + ctx.max_new_tokens)[:, None])


def _misshapen(part: Part, what: str, found: Any, kv: LayerView, need: str) -> ValueError:
    """The error for a part's array that does not fit the slots of a layer."""
    known = hasattr(found, "shape")
    given = f"of shape {found.shape} and type {found.dtype}" if known else f"as a {type(found).__name__}"
    return ValueError(
        f"{type(part).__name__} gives {what} {given}, but the layer has slots of shape {kv.pos.shape}; give {need}"
    )


def apply_decision(kv: LayerView, decision: Decision) -> LayerView:
    """The layer after a decision: slots that stay, and what they hold.

    Raises:
      ValueError: the decision gives a field that the layer's policy does not list in `writes`, or not for all slots.
    """
    written = {n: x for n in _WRITTEN if (x := getattr(decision, n)) is not None}
    if wrong := sorted(set(written) - set(kv.how.writes)):
        raise ValueError(
            f"a decision gives {wrong[0]}, but its policy writes {kv.how.writes or 'nothing'}; "
            f"list {wrong[0]!r} in `writes` of the part that gives it"
        )
    shapes = {"keep": kv.pos.shape, "k": kv.k.shape, "v": kv.v.shape, "log_weight": kv.pos.shape}
    for n, x in {"keep": decision.keep, **written}.items():
        if getattr(x, "shape", None) != shapes[n]:
            what = f"of shape {x.shape}" if hasattr(x, "shape") else f"as a {type(x).__name__}"
            raise ValueError(f"a decision gives {n} {what}, but the layer has {n} of shape {shapes[n]}; give all of it")
    fault = kv.fault if decision.unscored is None else kv.fault | decision.unscored
    fields = {n: x.astype(getattr(kv, n).dtype) for n, x in written.items()}
    return kv.keep(decision.keep).replace(fault=fault, **fields)


def _with_shares(kv: LayerView, shares: Int[Array, "B K"]) -> LayerView:
    return kv.replace(memory=Tree(**{**vars(kv.memory), "shares": shares}))


def check_kept(policy: Policy, layer: int, kv: Storage, hparams: PyTree, steps: Any = 0) -> None:
    """Refuses a layer with a `fault`, or whose kept tokens are over the budget, or not numbers (outside of `jit`).

    Args:
      policy: the layer's policy.
      layer: the layer's index.
      kv: the layer as it is stored afterwards.
      hparams: what `sizes` gave for the layer.
      steps: how many decode steps may have followed the prompt.

    Raises:
      ValueError: tokens of the prompt went, though no score was a number; a selection kept more tokens than its budget;
        what was written to slots that stay is not a number.
    """
    if (lost := np.asarray(kv.fault)).any():
        names = ", ".join(dict.fromkeys(type(p.score).__name__ for p in evicts(policy))) or type(policy).__name__
        raise ValueError(
            f"{names} gives no token a score that is a number (NaN in layer {layer}, in {lost.sum()} of {lost.size} kv "
            "heads of the batch), so that what stays of the prompt is no choice of it; mend the score, or what it reads"
        )
    policy = policy.policy if isinstance(policy, Coded) else policy
    if not isinstance(policy, Evict):
        return
    live = np.asarray(kv.num_live).max(-1).astype(np.int64)
    if policy.heads is None and policy.when.prefill:
        budget = np.asarray(hparams.budget)
        if (over := live > budget + policy.select.slack + (steps and policy.when.room(steps))).any():
            raise ValueError(
                f"the selection {type(policy.select).__name__} keeps {live[over][0]} tokens or more in a head of layer "
                f"{layer}, whose budget is {budget[over][0]}; keep at most `budgets`, protected ones included"
            )
    if policy.rewrite is not None:
        held = (kv.pos >= 0)[..., None]
        for n in policy.rewrite.writes:
            x = kv.values if n == "v" else rows_of(getattr(kv, n))
            if bool((held & jnp.isnan(x if x.ndim > kv.pos.ndim else x[..., None])).any()):
                raise ValueError(
                    f"{type(policy.rewrite).__name__} gives {n} that is not a number (NaN in layer {layer}) in slots "
                    "that stay; mend the rewrite, or what it reads"
                )


def _of_prompts(part: Part) -> Part | None:
    """The first part, of one and those inside it, that has no memory and observes prompts alone."""
    asked = [part.observe(phase) for phase in ("prefill", "replay", "decode")]
    if any(asked[:2]) and not asked[2] and type(part).update is Part.update:
        return part
    return next((found for x in children(part) if (found := _of_prompts(x))), None)


def evicts(x: object) -> list[Evict]:
    """The `Evict` policies inside of a policy, or of a tuple of policies."""
    return [p for p in inside(x) if isinstance(p, Evict)]
