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
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.context import Context, Phase, Site
from kvjax.pool import PooledKV
from kvjax.schedule import Schedule
from kvjax.state import KVState, LayerKV, Positions, evict
from kvjax.stats import AttentionStats, LayerStats, Measurement, Observe, ordered
from pallas_kernels.pytree import pytree
from pallas_kernels.values import checked, each

Granularity = Literal["kv_head", "query_head"]
Layout = Literal["dense", "pool"]


@pytree
class Selection:
    """What a policy decided for one layer.

    Attributes:
      keep: the slots that stay live.
      score: the score they were ranked by, -inf for slots that were dead already. Protected slots stay whatever theirs.
      budgets: live slots that every head may keep; real numbers where a relaxed policy was given some.
      gate: how much of every slot a relaxed policy keeps, in [0, 1]; it keeps some of everything.
    """

    keep: Bool[Array, "B K S"]
    score: Float[Array, "B K S"]
    budgets: Int[Array, "B K"] | Float[Array, "B K"]
    gate: Float[Array, "B K S"] | None = None

    def apply(self, kv: LayerKV) -> LayerKV:
        """The layer without the slots that go, or with the gates of a relaxed policy."""
        return evict(kv, self.keep) if self.gate is None else dataclasses.replace(kv, gate=self.gate)


class Policy(abc.ABC):
    """The contract between a policy, the planner and the drivers. Most methods are an `Evict`."""

    prunes_channels: ClassVar[bool] = False  # `transform` drops or zeroes channels, other ones in every head

    def observe(self, phase: Phase, site: Site) -> tuple[Measurement, ...]:
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

    def heads_of(self, site: Site) -> Granularity:
        """Whether the layer's cache has a set of slots for every kv head or for every query head."""
        del site
        return "kv_head"

    def layout(self, site: Site) -> Layout:
        """How the layer is stored after the prompt: "dense", or a "pool" of slots that heads share (`kvjax.pool`)."""
        del site
        return "dense"

    def gates(self, site: Site) -> bool:
        """Whether slots of this layer carry gates: the policy is relaxed."""
        del site
        return False

    def slots(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """The most live slots that all heads of this layer can hold together while decoding (static)."""
        return site.num_kv_heads * self.capacity(site, lengths)

    def check(self, site: Site, prompt_length: int) -> None:
        """Raises ValueError if the policy cannot work in this layer for a prompt of this length."""
        del site, prompt_length

    def most(self, kv: LayerKV, ctx: Context) -> Int[Array, "B K"] | None:
        """The most live slots that each head will hold while decoding, at most `slots` together; None if unknown.

        A pool gives every head that many. Without it, each gets the slots it holds and an equal share of the rest.

        Args:
          kv: the layer after the prompt.
          ctx: the moment after the prompt.
        """
        del kv, ctx
        return None

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

    def visible(self, kv: LayerKV, ctx: Context) -> Bool[Array, "B K S"] | None:
        """Live slots that the new row may read, None for all: for policies that mask instead of evicting."""
        del kv, ctx
        return None

    def measures(self, site: Site) -> Literal["visible", "live"] | None:
        """What statistics of decode rows are a softmax over; None for a policy that hides no slots."""
        del site
        return None

    def transform(self, kv: LayerKV | PooledKV, ctx: Context) -> LayerKV | PooledKV:
        """Changes how the prompt's cache is stored, after eviction and compaction."""
        del ctx
        return kv

    @property
    def layerwise(self) -> bool:
        """Whether each layer decides for itself; otherwise the model runs whole before the policy is called."""
        return True

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the prompt must be read at once, because what is measured of a block says nothing of the whole."""
        return False

    @property
    def needs_every_row(self) -> bool:
        """Whether the prompt must be read token by token, because every row decides what the next one reads."""
        return False

    def scheduled(self, schedule: Schedule) -> "Policy":
        """The same policy under another schedule."""
        del schedule
        return self

    def layer(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> LayerKV:
        """One layer after one step: memory updated, slots outside the decision dead."""
        memory, selection = self.decide(kv, stats, ctx)
        kv = dataclasses.replace(kv, memory=memory)
        return kv if selection is None else selection.apply(kv)

    def __call__(self, state: KVState, attn_stats: AttentionStats) -> KVState:
        """Applies the policy to every layer of a state, with the statistics of the rows just computed.

        Raises:
          ValueError: no state and its statistics, or a state whose plan is not this policy's.
        """
        _check_moment(self, state, attn_stats)
        layers = (
            on_view(lambda view, s=stats, i=i: self.layer(view, s, context(state, i, attn_stats.phase)), kv)
            for i, (kv, stats) in enumerate(zip(state.layers, attn_stats.layers, strict=True))
        )
        return dataclasses.replace(state, layers=tuple(layers))


def _check_moment(policy: Policy, state: Any, attn_stats: Any) -> None:
    """Raises ValueError for a state that a policy cannot be applied to, as one that decodes under another's plan."""
    if not isinstance(state, KVState) or not isinstance(attn_stats, AttentionStats):
        found = f"{type(state).__name__} and {type(attn_stats).__name__}"
        raise ValueError(f"a policy is applied to a KVState and the AttentionStats of forward(...), not to {found}")
    planned = state.plan.policy
    if policy == planned:
        return
    memory = lambda p: jax.eval_shape(lambda: [p.init(site, 1) for site in state.plan.sites])
    if attn_stats.phase == "decode" or jax.tree.structure(memory(policy)) != jax.tree.structure(memory(planned)):
        raise ValueError(f"the state was planned for {planned}, not for {policy}; make a plan with this policy")


def on_view(change: Callable[[LayerKV], LayerKV], kv: LayerKV | PooledKV) -> Any:
    """Applies a function of a `LayerKV` to a layer in either layout."""
    return kv.apply(change) if isinstance(kv, PooledKV) else change(kv)


def context(state: KVState, layer: int, phase: Phase) -> Context:
    """The moment that `state` is at, for one layer."""
    site = state.plan.sites[layer]
    return Context(state.length, state.prompt_length, state.keys, site=site, phase=phase)


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
class Chain(Policy):
    """Policies applied in turn; made by `chain`."""

    policies: tuple[Policy, ...]

    def observe(self, phase: Phase, site: Site) -> tuple[Measurement, ...]:
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

    def heads_of(self, site: Site) -> Granularity:
        """See `Policy`."""
        wanted = {p.heads_of(site) for p in self.policies}
        if len(wanted) > 1:
            raise ValueError(
                f"a layer stores its keys once, but the members of this chain want a set for every {sorted(wanted)}; "
                "give all of them the same granularity="
            )
        return wanted.pop()

    def layout(self, site: Site) -> Layout:
        """See `Policy`."""
        return "pool" if any(p.layout(site) == "pool" for p in self.policies) else "dense"

    def gates(self, site: Site) -> bool:
        """See `Policy`."""
        return any(p.gates(site) for p in self.policies)

    def slots(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """See `Policy`."""
        return min(p.slots(site, lengths) for p in self.policies)

    def check(self, site: Site, prompt_length: int) -> None:
        """See `Policy`."""
        for p in self.policies:
            p.check(site, prompt_length)
        if len(over := self._measured(site)) > 1:
            raise ValueError(
                f"a row's statistics are one softmax, but members of this chain want it over {sorted(over)} slots; "
                "chain policies that hide slots alike"
            )

    def target(self, site: Site, prompt_length: int) -> int:
        """See `Policy`."""
        return min(p.target(site, prompt_length) for p in self.policies)

    def capacity(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """See `Policy`."""
        return min(p.capacity(site, lengths) for p in self.policies)

    def most(self, kv: LayerKV, ctx: Context) -> Int[Array, "B K"] | None:
        """See `Policy`."""
        each = zip(self.policies, kv.memory, strict=True)
        bounds = [p.most(dataclasses.replace(kv, memory=m), ctx) for p, m in each]
        if all(b is None for b in bounds):
            return None
        whole = [jnp.full(kv.pos.shape[:2], p.capacity(ctx.site), jnp.int32) for p in self.policies]
        return functools.reduce(jnp.minimum, (w if b is None else b for b, w in zip(bounds, whole, strict=True)))

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
                kv = selection.apply(kv)
                decision = selection
        if decision is not None:
            decision = dataclasses.replace(decision, keep=kv.live, gate=kv.gate)
        return tuple(memories), decision

    def _in_turn(self, name: str, kv: Any, ctx: Context) -> Any:
        memories = kv.memory
        for p, memory in zip(self.policies, memories, strict=True):
            kv = getattr(p, name)(dataclasses.replace(kv, memory=memory), ctx)
        return dataclasses.replace(kv, memory=memories)

    def make_room(self, kv: LayerKV, ctx: Context) -> LayerKV:
        """See `Policy`."""
        return self._in_turn("make_room", kv, ctx)

    def transform(self, kv: LayerKV | PooledKV, ctx: Context) -> LayerKV | PooledKV:
        """See `Policy`."""
        return self._in_turn("transform", kv, ctx)

    def visible(self, kv: LayerKV, ctx: Context) -> Bool[Array, "B K S"] | None:
        """See `Policy`."""
        each = zip(self.policies, kv.memory, strict=True)
        shown = [v for p, m in each if (v := p.visible(dataclasses.replace(kv, memory=m), ctx)) is not None]
        return functools.reduce(jnp.logical_and, shown) if shown else None

    def _measured(self, site: Site) -> set[Literal["visible", "live"]]:
        return {over for p in self.policies if (over := p.measures(site)) is not None}

    def measures(self, site: Site) -> Literal["visible", "live"] | None:
        """See `Policy`; `check` refuses members that want different ones."""
        return next(iter(self._measured(site)), None)

    @property
    def layerwise(self) -> bool:
        """See `Policy`."""
        return all(p.layerwise for p in self.policies)

    @property
    def needs_whole_prompt(self) -> bool:
        """See `Policy`."""
        return any(p.needs_whole_prompt for p in self.policies)

    @property
    def needs_every_row(self) -> bool:
        """See `Policy`."""
        return any(p.needs_every_row for p in self.policies)


class _Delegating(Policy):
    """A policy that asks another one, layer by layer."""

    @abc.abstractmethod
    def of(self, site: Site) -> Policy:
        """The policy of one layer."""

    def observe(self, phase: Phase, site: Site) -> tuple[Measurement, ...]:
        """See `Policy`."""
        return self.of(site).observe(phase, site)

    def init(self, site: Site, batch: int) -> Any:
        """See `Policy`."""
        return self.of(site).init(site, batch)

    def key_positions(self, site: Site) -> Positions:
        """See `Policy`."""
        return self.of(site).key_positions(site)

    def heads_of(self, site: Site) -> Granularity:
        """See `Policy`."""
        return self.of(site).heads_of(site)

    def layout(self, site: Site) -> Layout:
        """See `Policy`."""
        return self.of(site).layout(site)

    def gates(self, site: Site) -> bool:
        """See `Policy`."""
        return self.of(site).gates(site)

    def slots(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """See `Policy`."""
        return self.of(site).slots(site, lengths)

    def most(self, kv: LayerKV, ctx: Context) -> Int[Array, "B K"] | None:
        """See `Policy`."""
        return self.of(ctx.site).most(kv, ctx)

    def check(self, site: Site, prompt_length: int) -> None:
        """See `Policy`."""
        self.of(site).check(site, prompt_length)

    def target(self, site: Site, prompt_length: int) -> int:
        """See `Policy`."""
        return self.of(site).target(site, prompt_length)

    def capacity(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """See `Policy`."""
        return self.of(site).capacity(site, lengths)

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """See `Policy`."""
        return self.of(ctx.site).decide(kv, stats, ctx)

    def make_room(self, kv: LayerKV, ctx: Context) -> LayerKV:
        """See `Policy`."""
        return self.of(ctx.site).make_room(kv, ctx)

    def transform(self, kv: LayerKV | PooledKV, ctx: Context) -> LayerKV | PooledKV:
        """See `Policy`."""
        return self.of(ctx.site).transform(kv, ctx)

    def visible(self, kv: LayerKV, ctx: Context) -> Bool[Array, "B K S"] | None:
        """See `Policy`."""
        return self.of(ctx.site).visible(kv, ctx)

    def measures(self, site: Site) -> Literal["visible", "live"] | None:
        """See `Policy`."""
        return self.of(site).measures(site)


@dataclasses.dataclass(frozen=True)
class Partition(_Delegating):
    """A policy for every layer; made by `partition`."""

    policies: tuple[tuple[Hashable, Policy], ...]
    labels: tuple[Hashable, ...]

    def of(self, site: Site) -> Policy:
        """See `_Delegating`."""
        if len(self.labels) != site.num_layers:
            raise ValueError(
                f"partition has {len(self.labels)} labels, but the model has {site.num_layers} layers; "
                "give one label a layer"
            )
        return dict(self.policies)[self.labels[site.layer]]

    def scheduled(self, schedule: Schedule) -> "Partition":
        """See `Policy`."""
        return Partition(tuple((label, p.scheduled(schedule)) for label, p in self.policies), self.labels)

    @property
    def layerwise(self) -> bool:
        """See `Policy`."""
        return all(p.layerwise for _, p in self.policies)

    @property
    def needs_whole_prompt(self) -> bool:
        """See `Policy`."""
        return any(p.needs_whole_prompt for _, p in self.policies)

    @property
    def needs_every_row(self) -> bool:
        """See `Policy`."""
        return any(p.needs_every_row for _, p in self.policies)


def identity() -> Policy:
    """Keeps everything. The unit of `chain`."""
    return Identity()


def chain(*policies: Policy) -> Policy:
    """Policies applied in turn at every step: a later member sees only what the earlier ones kept.

    All members read statistics of the same attention. The tightest budget wins.
    """
    flat: list[Policy] = []
    for p in policies:
        _check_policy(p)
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
      ValueError: no mapping to policies, no labels, or a label without a policy.
    """
    if not isinstance(policies, Mapping):
        raise ValueError(f"policies={policies!r}: give a mapping from labels to policies")
    for policy in policies.values():
        _check_policy(policy)
    every = checked(each(_label), "labels", list(labels) if isinstance(labels, str) else labels)
    if not every:
        raise ValueError("labels is empty; give one label a layer")
    unknown = sorted({str(label) for label in every if label not in policies})
    if unknown:
        raise ValueError(f"labels {unknown} have no policy; the policies are for {sorted(map(str, policies))}")
    return Partition(tuple(policies.items()), every)


def _label(label: Hashable) -> Hashable:
    """The rule of labels: what a mapping can be asked for."""
    if not isinstance(label, Hashable):
        raise ValueError(f"{label!r} cannot be a label; use a name or a number")
    return label


def _check_policy(policy: Any) -> None:
    """Raises ValueError for what is no policy, such as a method's name."""
    if not isinstance(policy, Policy):
        raise ValueError(f"{policy!r} is not a policy; call a method with its budget, such as kvjax.methods.h2o(64)")


def when(schedule: Schedule, policy: Policy) -> Policy:
    """The same policy (every member of it) under another schedule.

    Raises:
      ValueError: arguments of other kinds or in another order, or a policy whose schedule cannot change.
    """
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{schedule!r} is not a schedule; write when(schedule, policy), such as when(every(16), ...)")
    _check_policy(policy)
    return policy.scheduled(schedule)


@dataclasses.dataclass(frozen=True)
class SharedLayers(_Delegating):
    """One decision for all layers; made by `shared_layers`."""

    policy: Policy

    def of(self, site: Site) -> Policy:
        """See `_Delegating`."""
        del site
        return self.policy

    @property
    def layerwise(self) -> bool:
        """See `Policy`."""
        return False

    @property
    def needs_whole_prompt(self) -> bool:
        """See `Policy`."""
        return self.policy.needs_whole_prompt

    @property
    def needs_every_row(self) -> bool:
        """See `Policy`."""
        return self.policy.needs_every_row

    def check(self, site: Site, prompt_length: int) -> None:
        """See `Policy`."""
        apart = [o for phase in _PHASES for o in self.policy.observe(phase, site) if not isinstance(o, Observe)]
        if apart:
            raise ValueError(
                f"one decision for all layers sums attention statistics over them, but {apart[0]} is none; "
                "share a policy whose score is made of Observe(...)"
            )
        first = _first(site)
        here, there = self.policy.target(site, prompt_length), self.policy.target(first, prompt_length)
        if here != there:
            raise ValueError(
                f"one decision for all layers needs the same budget in all of them, but layer {site.layer} has {here} "
                f"tokens and layer 0 has {there}; use layers=UniformLayers()"
            )
        self.policy.check(first, prompt_length)

    def scheduled(self, schedule: Schedule) -> "SharedLayers":
        """See `Policy`."""
        return SharedLayers(self.policy.scheduled(schedule))

    def observe(self, phase: Phase, site: Site) -> tuple[Measurement, ...]:
        """See `Policy`."""
        return self.policy.observe(phase, _first(site))

    def init(self, site: Site, batch: int) -> Any:
        """See `Policy`."""
        return self.policy.init(_first(site), batch)

    def capacity(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """See `Policy`; every layer holds what the first one does."""
        return self.policy.capacity(_first(site), lengths)

    def slots(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """See `Policy`; every layer holds what the first one does."""
        return self.policy.slots(_first(site), lengths)

    def most(self, kv: LayerKV, ctx: Context) -> Int[Array, "B K"] | None:
        """See `Policy`; every layer holds what the first one does."""
        return self.policy.most(kv, _in_first(ctx))

    def make_room(self, kv: LayerKV, ctx: Context) -> LayerKV:
        """See `Policy`; for one layer alone."""
        return self.policy.make_room(kv, _in_first(ctx))

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """See `Policy`; for one layer alone."""
        return self.policy.decide(kv, stats, _in_first(ctx))

    def __call__(self, state: KVState, attn_stats: AttentionStats) -> KVState:
        """The first layer decides by the sum of all layers' statistics, and all do as it says."""
        _check_moment(self, state, attn_stats)
        values = [layer.values for layer in attn_stats.layers]
        total = LayerStats(
            tuple(functools.reduce(jnp.add, v) for v in zip(*values, strict=True)), attn_stats.layers[0].observed
        )
        first = state.layers[0]
        view = first.view() if isinstance(first, PooledKV) else first
        memory, selection = self.decide(view, total, context(state, 0, attn_stats.phase))

        def obey(kv: LayerKV) -> LayerKV:
            kv = dataclasses.replace(kv, memory=memory)
            return kv if selection is None else selection.apply(kv)

        return dataclasses.replace(state, layers=tuple(on_view(obey, kv) for kv in state.layers))


_PHASES: tuple[Phase, ...] = ("prefill", "decode")


def _first(site: Site) -> Site:
    return dataclasses.replace(site, layer=0)


def _in_first(ctx: Context) -> Context:
    return dataclasses.replace(ctx, site=_first(ctx.site))


def shared_layers(policy: Policy) -> Policy:
    """One score, summed over layers as well as rows, and one decision that every layer applies.

    Keyformer's shared score (arXiv 2403.09054, section 3.3, D-35), and the uniform ablation of NaCl. The whole prompt's
    keys and values of all layers exist until the decision is made, so peak memory grows with depth. A score that looks
    at keys sees those of the first layer.

    Raises:
      ValueError: what is no policy; in `make_plan`, a policy that measures something that cannot be summed over layers,
        or layers of different budgets.
    """
    _check_policy(policy)
    return SharedLayers(policy)
