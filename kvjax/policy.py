"""Policies, and their algebra. A policy is a frozen dataclass: `policy(state, attn_stats) -> state`.

It prints as its definition, compares by value, hashes, and is changed with `dataclasses.replace`. Policies never move
slots: they mark them dead, so the members of a chain see statistics that still belong to their slots.

Laws (tested over all methods): `chain` is associative with unit `identity()`; no dead slot comes back; live slots never
exceed the budget; protected tokens live; permuting slots permutes the result; a row of a padded batch gets what it
would get alone.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.allocation import HeadAllocation, LayerAllocation, UniformHeads, UniformLayers
from kvjax.budget import Count, Tokens, as_budget, as_count, lookup
from kvjax.context import Context, Phase, Site
from kvjax.protect import Protect, protected
from kvjax.schedule import Schedule
from kvjax.scores import FromFunction, Score
from kvjax.select import Select, TopK
from kvjax.state import KVState, LayerKV, PerHead, Positions, evict
from kvjax.stats import AttentionStats, LayerStats, Observe, ordered
from pallas_kernels.pytree import pytree


@pytree
class Selection:
    """What a policy decided for one layer.

    Attributes:
      keep: the slots that stay live.
      score: the score they were ranked by, -inf for slots that were dead already. Protected slots stay whatever theirs.
      budgets: live slots that every head may keep.
    """

    keep: Bool[Array, "B K S"]
    score: Float[Array, "B K S"]
    budgets: Int[Array, "B K"]


class Policy(abc.ABC):
    """The contract between a policy, the planner and the drivers. Most methods are an `Evict`."""

    def observe(self, phase: Phase, site: Site) -> tuple[Observe, ...]:
        """The statistics this policy needs in a layer. None are measured, and nothing is paid, for an empty tuple."""
        del phase, site
        return ()

    def init(self, site: Site, batch: int) -> Any:
        """The policy's memory for a layer without slots: arrays "B K 0 ...", or `PerHead` arrays "B K ..."."""
        del site, batch
        return ()

    def key_positions(self, site: Site) -> Positions:
        """How the layer's keys are rotated."""
        del site
        return "original"

    def check(self, site: Site, prompt_length: int) -> None:
        """Raises ValueError if the policy cannot work in this layer for a prompt of this length."""
        del site, prompt_length

    @abc.abstractmethod
    def target(self, site: Site, prompt_length: int) -> int:
        """Live slots a head of this layer may keep, on average over heads, for a prompt of this length."""

    @abc.abstractmethod
    def capacity(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """The most live slots one head of this layer can hold while decoding (static).

        Args:
          site: the layer.
          lengths: the prompts' lengths, None for any up to the plan's.
        """

    @abc.abstractmethod
    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """Called after a step's attention, in both phases.

        Returns:
          The policy's memory after the step, and what to keep, or None if this policy evicts nothing now.
        """

    def make_room(self, kv: LayerKV, ctx: Context) -> LayerKV:
        """Evicts before a decode step appends its token. Most policies evict afterwards instead."""
        del ctx
        return kv

    def scheduled(self, schedule: Schedule) -> "Policy":
        """The same policy under another schedule."""
        del schedule
        return self

    def layer(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> LayerKV:
        """One layer after one step: memory updated, slots outside the decision dead."""
        memory, selection = self.decide(kv, stats, ctx)
        kv = dataclasses.replace(kv, memory=memory)
        return kv if selection is None else evict(kv, selection.keep)

    def __call__(self, state: KVState, attn_stats: AttentionStats) -> KVState:
        """Applies the policy to every layer of a state, with the statistics of the rows just computed."""
        layers = (
            self.layer(kv, stats, context(state, i, attn_stats.phase))
            for i, (kv, stats) in enumerate(zip(state.layers, attn_stats.layers, strict=True))
        )
        return dataclasses.replace(state, layers=tuple(layers))


def context(state: KVState, layer: int, phase: Phase) -> Context:
    """The moment that `state` is at, for one layer."""
    site = state.plan.sites[layer]
    return Context(state.length, state.prompt_length, state.step, state.keys, site=site, phase=phase)


@dataclasses.dataclass(frozen=True)
class Identity(Policy):
    """Keeps everything: the full cache."""

    def target(self, site: Site, prompt_length: int) -> int:
        """See `Policy`."""
        return prompt_length + site.max_new_tokens

    def capacity(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """See `Policy`."""
        del lengths
        return site.prompt_len + site.max_new_tokens

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, None]:
        """See `Policy`."""
        del stats, ctx
        return kv.memory, None


@dataclasses.dataclass(frozen=True)
class Evict(Policy):
    """Keeps the best-scored tokens within a budget: the composition that nearly every published method is.

    Attributes:
      score: ranks tokens.
      budget: live tokens a kv head and layer, on average, protected ones included: a number of tokens (int) or a share
        of the prompt (float).
      protect: tokens that are never evicted.
      layers: how the budget is divided over layers. Protected tokens come first; what is left of the budget is divided.
      heads: how a layer's budget is divided over its kv heads, again after protection. While decoding, heads keep the
        shares that the prompt gave them.
      when: the schedule.
      select: how scores become a keep mask.
      positions: how keys are rotated: "original" at their absolute positions, "compact" by rank among live keys.
    """

    score: Score
    budget: int | float | Count
    protect: Protect = Protect()
    layers: LayerAllocation = UniformLayers()
    heads: HeadAllocation = UniformHeads()
    when: Schedule = Schedule()
    select: Select = TopK()
    positions: Positions = "original"

    def __post_init__(self):
        budget = as_budget(self.budget)
        sinks, recent = as_count(self.protect.sinks, "sinks"), as_count(self.protect.recent, "recent")
        fixed = sum(c.n for c in (sinks, recent) if isinstance(c, Tokens))
        if isinstance(budget, Tokens) and fixed > budget.n:
            raise ValueError(
                f"a budget of {budget.n} tokens cannot hold the {fixed} that protect keeps "
                f"(sinks={self.protect.sinks}, recent={self.protect.recent}); raise the budget or protect fewer"
            )
        if self.when.decodes and not self.score.decodes:
            raise ValueError(
                f"{self.score} ranks prompt tokens only, but {self.when} evicts while decoding; "
                "use after_prefill() or a score that accumulates"
            )
        if self.when.before_append and self.score.observe("decode"):
            raise ValueError(
                f"{self.when} evicts before attention runs, but {self.score} needs the step's attention; "
                "use every_step()"
            )
        if self.positions not in ("original", "compact"):
            raise ValueError(f"positions={self.positions!r} is not one of ('original', 'compact')")

    # Sizes: numpy on the host, one entry for every prompt length that the plan may meet.

    def _sizes(self, site: Site) -> "_Sizes":
        return _sizes(as_budget(self.budget), self.protect, self.layers, site.num_layers, site.prompt_len)

    def _cap(self, site: Site, lengths: Sequence[int] | None) -> int:
        """The most tokens that one head may keep at an eviction."""
        sizes = self._sizes(site)
        n = np.arange(site.prompt_len + 1) if lengths is None else np.array([*lengths])
        outside = sizes.outside[n]
        average = sizes.budget[n, site.layer] - outside
        return int((self.heads.cap(average, np.maximum(n - outside, 0), site.num_kv_heads) + outside).max())

    def target(self, site: Site, prompt_length: int) -> int:
        """See `Policy`."""
        return int(self._sizes(site).budget[prompt_length, site.layer])

    def capacity(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """See `Policy`."""
        cap = self._cap(site, lengths)
        after_prefill = cap if self.when.prefill else max(cap, site.prompt_len)
        total = site.prompt_len + site.max_new_tokens
        return min(total, after_prefill + self.when.room(site.max_new_tokens))

    def check(self, site: Site, prompt_length: int) -> None:
        """See `Policy`."""
        sizes = self._sizes(site)
        budget = int(sizes.budget[prompt_length, site.layer])
        sinks, recent = int(sizes.sinks[prompt_length]), int(sizes.recent[prompt_length])
        longest = prompt_length + (site.max_new_tokens if self.when.decodes else 0)
        if sinks + recent > budget and longest > budget:
            advice = "" if isinstance(self.layers, UniformLayers) else f" or change {self.layers}"
            raise ValueError(
                f"layer {site.layer} gets a budget of {budget} tokens for a prompt of {prompt_length}, but protect "
                f"keeps {sinks + recent} (sinks={sinks}, recent={recent}); raise the budget (now {self.budget}){advice}"
            )

    @property
    def _remembers_heads(self) -> bool:
        return self.when.decodes and not isinstance(self.heads, UniformHeads)

    # The policy itself.

    def observe(self, phase: Phase, site: Site) -> tuple[Observe, ...]:
        """See `Policy`."""
        del site
        needed = self.when.decodes or (phase == "prefill" and self.when.prefill)
        return self.score.observe(phase) if needed else ()

    def init(self, site: Site, batch: int) -> Any:
        """See `Policy`."""
        memory = self.score.init(site, batch)
        if not self._remembers_heads:
            return memory
        return memory, PerHead(jnp.zeros((batch, site.num_kv_heads), jnp.int32))

    def key_positions(self, site: Site) -> Positions:
        """See `Policy`."""
        del site
        return self.positions

    def scheduled(self, schedule: Schedule) -> "Evict":
        """See `Policy`."""
        return dataclasses.replace(self, when=schedule)

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """See `Policy`."""
        if ctx.phase == "decode" and not self.when.decodes:
            return kv.memory, None
        memory, shares = kv.memory if self._remembers_heads else (kv.memory, None)
        memory = self.score.update(memory, kv, stats, ctx)
        if ctx.phase == "prefill":
            if not self.when.prefill and shares is None:
                return memory, None
            selection, selectable = self._select(memory, None, kv, stats, ctx)
            memory = memory if shares is None else (memory, PerHead(selectable))
            return memory, selection if self.when.prefill else None
        selection = None if self.when.before_append else self._scheduled_select(memory, shares, kv, stats, ctx)
        return memory if shares is None else (memory, shares), selection

    def make_room(self, kv: LayerKV, ctx: Context) -> LayerKV:
        """See `Policy`."""
        if not self.when.before_append:
            return kv
        memory, shares = kv.memory if self._remembers_heads else (kv.memory, None)
        # The coming token counts against the budget and against the recent window.
        ahead = dataclasses.replace(ctx, length=ctx.length + 1)
        selection, _ = self._select(memory, shares, kv, LayerStats(), ahead, reserve=1)
        return evict(kv, selection.keep)

    def _scheduled_select(self, memory, shares, kv, stats, ctx) -> Selection:
        """The selection of a decode step, where one is due."""
        if self.when.every == 1:
            return self._select(memory, shares, kv, stats, ctx)[0]
        budgets = jnp.broadcast_to(self._now(ctx)[0][:, None], kv.pos.shape[:2])
        score = jnp.where(kv.live, jnp.zeros((), jnp.float32), -jnp.inf)
        nothing = Selection(kv.live, score, budgets)
        if self.when.every is not None:
            due = jnp.broadcast_to(ctx.step % self.when.every == 0, budgets.shape)
        else:
            due = kv.num_live >= budgets + (self.when.over or 0)
        chosen = lax.cond(due.any(), lambda: self._select(memory, shares, kv, stats, ctx)[0], lambda: nothing)
        return dataclasses.replace(chosen, keep=jnp.where(due[..., None], chosen.keep, kv.live))

    def _now(self, ctx: Context) -> tuple[Int[Array, "B"], Int[Array, "B"], Int[Array, "B"]]:
        """(budget, sinks, recent) of every sequence."""
        sizes = self._sizes(ctx.site)
        n = ctx.prompt_length
        return lookup(sizes.budget[:, ctx.site.layer], n), lookup(sizes.sinks, n), lookup(sizes.recent, n)

    def _select(self, memory, shares, kv, stats, ctx, *, reserve: int = 0) -> tuple[Selection, Int[Array, "B K"]]:
        """The selection, and the tokens that every head was given beyond its protected ones."""
        budget, sinks, recent = self._now(ctx)
        safe = protected(kv.pos, ctx.length, sinks, recent)
        candidates = kv.live & ~safe
        score = self.score(memory, kv, stats, ctx, candidates).astype(jnp.float32)
        outside = jnp.minimum(sinks + recent, budget)
        if shares is None:
            most = int(self._sizes(ctx.site).budget[:, ctx.site.layer].max())
            selectable = self.heads.heads(score, candidates, budget - outside, most)
        else:
            selectable = shares.value
        budgets = selectable + outside[:, None] - reserve
        score = jnp.where(kv.live, score, -jnp.inf)
        at_once = None
        if ctx.phase == "decode" and self.when.prefill:
            at_once = max(reserve, self.when.room(ctx.site.max_new_tokens))
        keep = self.select(
            jnp.where(safe, jnp.inf, score), kv.pos, budgets, cap=self._cap(ctx.site, None), most=at_once
        )
        return Selection(keep, score, budgets), selectable


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Whole tokens, one row for every prompt length from 0 to the plan's.

    Attributes:
      budget: "M L".
      sinks, recent: "M".
    """

    budget: np.ndarray
    sinks: np.ndarray
    recent: np.ndarray

    @property
    def outside(self) -> np.ndarray:
        """Protected tokens of a layer that has its average budget."""
        return np.minimum(self.sinks + self.recent, self.budget.min(1))


@functools.lru_cache(maxsize=64)
def _sizes(budget: Count, protect: Protect, layers: LayerAllocation, num_layers: int, prompt_len: int) -> _Sizes:
    n = np.arange(prompt_len + 1)
    average = np.maximum(budget.table(n, n), 1)
    sinks, recent = protect.tables(n, average)
    outside = np.minimum(sinks + recent, average)
    selectable = average - outside
    per_layer = layers.layers(selectable, np.maximum(n - outside, selectable), num_layers)
    return _Sizes(per_layer + outside[:, None], sinks, recent)


@dataclasses.dataclass(frozen=True)
class Chain(Policy):
    """Policies applied in turn; made by `chain`."""

    policies: tuple[Policy, ...]

    def observe(self, phase: Phase, site: Site) -> tuple[Observe, ...]:
        """See `Policy`."""
        return ordered(o for p in self.policies for o in p.observe(phase, site))

    def init(self, site: Site, batch: int) -> tuple[Any, ...]:
        """See `Policy`."""
        return tuple(p.init(site, batch) for p in self.policies)

    def key_positions(self, site: Site) -> Positions:
        """See `Policy`."""
        wanted = {p.key_positions(site) for p in self.policies}
        if len(wanted) > 1:
            raise ValueError(
                f"a layer rotates its keys in one way, but the members of this chain want {sorted(wanted)}; "
                "give all of them the same positions="
            )
        return wanted.pop()

    def check(self, site: Site, prompt_length: int) -> None:
        """See `Policy`."""
        for p in self.policies:
            p.check(site, prompt_length)

    def target(self, site: Site, prompt_length: int) -> int:
        """See `Policy`."""
        return min(p.target(site, prompt_length) for p in self.policies)

    def capacity(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """See `Policy`."""
        return min(p.capacity(site, lengths) for p in self.policies)

    def scheduled(self, schedule: Schedule) -> Policy:
        """See `Policy`."""
        return chain(*(p.scheduled(schedule) for p in self.policies))

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """See `Policy`."""
        memories, decision = [], None
        for p, memory in zip(self.policies, kv.memory, strict=True):
            memory, selection = p.decide(dataclasses.replace(kv, memory=memory), stats, ctx)
            memories.append(memory)
            if selection is not None:
                kv = evict(kv, selection.keep)
                decision = selection
        if decision is not None:
            decision = dataclasses.replace(decision, keep=kv.live)
        return tuple(memories), decision

    def make_room(self, kv: LayerKV, ctx: Context) -> LayerKV:
        """See `Policy`."""
        memories = kv.memory
        for p, memory in zip(self.policies, memories, strict=True):
            kv = p.make_room(dataclasses.replace(kv, memory=memory), ctx)
        return dataclasses.replace(kv, memory=memories)


@dataclasses.dataclass(frozen=True)
class Partition(Policy):
    """A policy for every layer; made by `partition`."""

    policies: tuple[tuple[Hashable, Policy], ...]
    labels: tuple[Hashable, ...]

    def of(self, site: Site) -> Policy:
        """The policy of one layer."""
        if len(self.labels) != site.num_layers:
            raise ValueError(
                f"partition has {len(self.labels)} labels, but the model has {site.num_layers} layers; "
                "give one label a layer"
            )
        return dict(self.policies)[self.labels[site.layer]]

    def observe(self, phase: Phase, site: Site) -> tuple[Observe, ...]:
        """See `Policy`."""
        return self.of(site).observe(phase, site)

    def init(self, site: Site, batch: int) -> Any:
        """See `Policy`."""
        return self.of(site).init(site, batch)

    def key_positions(self, site: Site) -> Positions:
        """See `Policy`."""
        return self.of(site).key_positions(site)

    def check(self, site: Site, prompt_length: int) -> None:
        """See `Policy`."""
        self.of(site).check(site, prompt_length)

    def target(self, site: Site, prompt_length: int) -> int:
        """See `Policy`."""
        return self.of(site).target(site, prompt_length)

    def capacity(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """See `Policy`."""
        return self.of(site).capacity(site, lengths)

    def scheduled(self, schedule: Schedule) -> "Partition":
        """See `Policy`."""
        return Partition(tuple((label, p.scheduled(schedule)) for label, p in self.policies), self.labels)

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """See `Policy`."""
        return self.of(ctx.site).decide(kv, stats, ctx)

    def make_room(self, kv: LayerKV, ctx: Context) -> LayerKV:
        """See `Policy`."""
        return self.of(ctx.site).make_room(kv, ctx)


def identity() -> Policy:
    """Keeps everything. The unit of `chain`."""
    return Identity()


def chain(*policies: Policy) -> Policy:
    """Policies applied in turn at every step: a later member sees only what the earlier ones kept.

    All members read statistics of the same attention. The tightest budget wins.
    """
    flat: list[Policy] = []
    for p in policies:
        flat += p.policies if isinstance(p, Chain) else () if isinstance(p, Identity) else (p,)
    if not flat:
        return Identity()
    return flat[0] if len(flat) == 1 else Chain(tuple(flat))


def partition(policies: Mapping[Hashable, Policy], labels: Sequence[Hashable]) -> Policy:
    """Different policies for different layers.

    Args:
      policies: label to policy.
      labels: one label a layer.

    Raises:
      ValueError: a label without a policy.
    """
    unknown = sorted({str(label) for label in labels if label not in policies})
    if unknown:
        raise ValueError(f"labels {unknown} have no policy; the policies are for {sorted(map(str, policies))}")
    return Partition(tuple(policies.items()), tuple(labels))


def when(schedule: Schedule, policy: Policy) -> Policy:
    """The same policy (every member of it) under another schedule."""
    return policy.scheduled(schedule)


def from_fn(
    fn: Callable[[LayerKV, LayerStats, Context], Float[Array, "B K S"]],
    *,
    budget: int | float | Count,
    observe: Sequence[Observe] = (),
    **fields: Any,
) -> Evict:
    """A policy from a scoring function.

    Args:
      fn: `(kv, stats, ctx) -> score`, larger = keep. Keep one function object: policies compare by value, functions by
        identity.
      budget: as in `Evict`.
      observe: the statistics that `fn` reads, as `stats[Observe(...)]`.
      **fields: other fields of `Evict`.
    """
    return Evict(FromFunction(fn, tuple(observe)), budget, **fields)
