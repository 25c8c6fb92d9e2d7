"""What a policy is: a frozen dataclass, `policy(state, attn_stats) -> state`.

It prints as its definition, compares by value, hashes, and is changed with `dataclasses.replace`. Policies never move
slots: they mark them dead, so the members of a chain see statistics that still belong to their slots.

In every layer a policy is a tuple of rules that are applied in turn; compositions have nothing else of their own. What
is static about a rule in a layer is one value, its `LayerSpec`, and specs of several rules are merged field by field.
What is traced are the moments of a `Rule`: `make_room`, `appended`, `visible`, `decide`, `finish`. `kvjax.algebra`
composes them.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.cache import mesh
from kvjax.cache.context import Context, Phase, Site
from kvjax.cache.pool import PooledKV
from kvjax.cache.state import Chosen, KeyPositions, KVState, LayerKV, Positions
from kvjax.pallas_kernels.values import Value
from kvjax.scoring.replay import Replay
from kvjax.scoring.select import InTurn, Selection, check_plain
from kvjax.scoring.stats import AttentionStats, LayerStats, Measurement, Moment, check_memory, ordered
from kvjax.sizes.schedule import Schedule

Granularity = Literal["kv_head", "query_head"]
Layout = Literal["dense", "pool"]
Reads = Literal["blocks", "whole", "rows"]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerSpec:
    """Everything static about a policy in one layer. Sizes are tables over prompt lengths, from 0 to the plan's.

    Attributes:
      target: live slots that a head may keep, on average over heads.
      capacity: the most live slots of one head while decoding.
      slots: the most live slots of all heads together while decoding.
      prompt, step: what is measured of the prompt's rows, or of rows that repeat it (`Measurement.again`), and of a
        decode step's; nothing is paid for an empty tuple.
      heads: the layer has a set of slots for every kv head, or for every query head.
      positions: how its keys are rotated.
      storage: how it is stored after the prompt: "dense", or a "pool" of slots that heads share (`kvjax.cache.pool`).
      reads: prompts may be read in "blocks"; only "whole", because what is measured of a block says nothing of the
        whole; or only by "rows", because every row decides what the next one reads.
      gates: slots carry gates between 0 and 1: the policy is relaxed.
      hides: what statistics of a decode row are a softmax over, where live slots are hidden from it; None where none
        are.
      prunes: key channels are dropped or zeroed after the prompt, other ones in every head.
      timed: what is kept may depend on how many tokens the run is planned for (`Site.max_new_tokens`), as temperatures
        do that end at the last one. Runs under other rules may be planned for a few more than they are asked for.
      first: how many first tokens are kept at most, where what is kept, always, is those and the last ones of a
        sequence, nothing between; None elsewhere.
    """

    target: np.ndarray
    capacity: np.ndarray
    slots: np.ndarray
    prompt: tuple[Measurement, ...] = ()
    step: tuple[Measurement, ...] = ()
    heads: Granularity = "kv_head"
    positions: Positions = "original"
    storage: Layout = "dense"
    reads: Reads = "blocks"
    gates: bool = False
    hides: Literal["visible", "live"] | None = None
    prunes: bool = False
    timed: bool = True
    finite: bool = False
    first: int | None = None

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """What is measured in a phase, of the rows that it reads."""
        return tuple(m for m in self.prompt if m.again is None) if phase == "prefill" else self.step

    @property
    def replays(self) -> tuple[Replay, ...]:
        """How the prompt is read again before anything of it is evicted."""
        return tuple(dict.fromkeys(m.again for m in self.prompt if m.again is not None))


def keeps_all(site: Site, **fields: Any) -> LayerSpec:
    """The spec of a rule that evicts nothing.

    Args:
      site: the layer.
      **fields: other fields of `LayerSpec`.
    """
    total = np.arange(site.prompt_len + 1) + site.max_new_tokens
    return LayerSpec(total, total, site.num_kv_heads * total, **fields)


def merged(rules: "Sequence[Rule]", site: Site) -> LayerSpec:
    """The spec of rules that are applied in turn: the tightest sizes, all measurements, and what they must agree on.

    Raises:
      ValueError: rules that want different things of one cache.
    """
    if not rules:
        return keeps_all(site, timed=False)
    specs = [rule.spec(site) for rule in rules]

    def least(name: str) -> np.ndarray:
        return functools.reduce(np.minimum, (getattr(spec, name) for spec in specs))

    def union(name: str) -> tuple[Measurement, ...]:
        return ordered(m for spec in specs for m in getattr(spec, name))

    def same(name: str, why: str, fix: str, ignored: Any = ...) -> Any:
        wanted = {getattr(spec, name) for spec in specs} - {ignored}
        if len(wanted) > 1:
            raise ValueError(f"{why.format(sorted(wanted))}; {fix}")
        return next(iter(wanted), ignored)

    spec = LayerSpec(
        least("target"),
        least("capacity"),
        least("slots"),
        union("prompt"),
        union("step"),
        same(
            "heads",
            "a layer stores its keys once, but the members of this chain want a set for every {}",
            "give all of them the same granularity=",
        ),
        same(
            "positions",
            "a layer rotates its keys in one way, but the members of this chain want {}",
            "give all of them the same positions=",
        ),
        "pool" if any(spec.storage == "pool" for spec in specs) else "dense",
        same(
            "reads",
            "a prompt is read in one way, but members of this chain can read it only as {}",
            "chain policies that read prompts alike",
            "blocks",
        ),
        any(spec.gates for spec in specs),
        same(
            "hides",
            "a row's statistics are one softmax, but members of this chain want it over {} slots",
            "chain policies that hide slots alike",
            None,
        ),
        any(spec.prunes for spec in specs),
        any(spec.timed for spec in specs),
        any(spec.finite for spec in specs),
        first=specs[0].first if len(specs) == 1 else None,
    )
    pruning = sum(spec.prunes for spec in specs)
    if pruning > 1:
        raise ValueError(
            f"{pruning} members of a chain drop key channels in layer {site.layer}, but what one has dropped the next "
            "cannot choose from; use 1 of them"
        )
    if spec.storage == "pool" and (spec.prunes or spec.gates):
        what = "heads drop different channels" if spec.prunes else "relaxed policies have gates"
        raise ValueError(
            f"{what}, so their keys cannot share a pool; use storage='dense' for all members of the chain in layer "
            f"{site.layer}"
        )
    evicting = [(rule, spec.gates) for rule, spec in zip(rules, specs, strict=True) if not spec.prunes]
    hard = [rule for rule, gates in evicting if not gates]
    if spec.gates and hard:
        raise ValueError(
            f"a relaxed policy keeps some of every slot, but {hard[0]} in the same chain keeps or evicts them; soften "
            f"the chain instead of {len(evicting) - len(hard)} of its {len(evicting)} members: "
            "soften(chain(...), temperature)"
        )
    return spec


class Policy(Value, abc.ABC):
    """In every layer, some rules that are applied in turn. Most methods are one rule, an `Evict`."""

    shared: ClassVar[bool] = False  # one decision for all layers, made when the model has run
    alike: ClassVar[bool] = False  # by it all layers hold the same tokens, those of the first one

    @abc.abstractmethod
    def rules(self, site: Site) -> "tuple[Rule, ...]":
        """The rules of a layer."""

    def at(self, site: Site) -> "LayerPolicy":
        """The policy in one layer, as drivers use it."""
        return LayerPolicy(self.rules(site), site)

    def check(self, site: Site, prompt_length: int) -> None:
        """Raises ValueError if the policy cannot work in this layer for a prompt of this length."""
        for rule in self.rules(site):
            rule.check(site, prompt_length)

    def layer(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> LayerKV:
        """One layer after one step: memory updated, slots outside the decision dead."""
        return self.at(ctx.site).step(kv, stats, ctx)

    def __call__(self, state: KVState, attn_stats: AttentionStats) -> KVState:
        """Applies the policy to every layer of a state, with the statistics of the rows just computed.

        Raises:
          ValueError: no state and its statistics, or a state whose plan is not this policy's; outside of jit, tokens of
            a prompt that go by scores none of which is a number.
        """
        check_moment(self, state, attn_stats)
        here = attn_stats.phase, attn_stats.tokens
        layers = (
            kv.apply(lambda view, s=stats, i=i: self.layer(view, s, context(state, i, *here)))
            for i, (kv, stats) in enumerate(zip(state.layers, attn_stats.layers, strict=True))
        )
        after = dataclasses.replace(state, layers=tuple(layers))
        return as_scored(after) if attn_stats.phase == "prefill" else after


def as_scored(state: KVState) -> KVState:
    """The state itself, once it is there: called when a prompt has been read, not while decoding. Traced ones pass.

    Raises:
      ValueError: tokens of the prompt went by scores none of which is a number.
    """
    for layer, kv in zip(state.plan.layers, state.layers, strict=True):
        layer.check_scored(kv.memory)
    return state


class Rule(Policy):
    """One method in one layer: the contract between it, the planner and the drivers.

    Its memory is what `init` gives and `decide` returns; in a layer's cache it is one entry of a tuple, and the cache
    that a rule is given has its own entry as `memory`.
    """

    def rules(self, site: Site) -> "tuple[Rule, ...]":
        """Itself."""
        del site
        return (self,)

    @property
    def by_head(self) -> bool:
        """Whether every kv head decides by what it holds alone, so that heads may have rules of their own."""
        return False

    @property
    def apart(self) -> bool:
        """Whether devices that share a layer's heads may decide each for its own; otherwise all see all heads."""
        return False

    @abc.abstractmethod
    def spec(self, site: Site) -> LayerSpec:
        """Everything static about the rule in a layer."""

    @abc.abstractmethod
    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """Called after a step's attention, in both phases.

        Returns:
          The rule's memory after the step, and what to keep, or None if it evicts nothing now.
        """

    def init(self, site: Site, batch: int) -> Any:
        """The memory of a layer without slots: arrays "B K 0 ...", or `PerHead` arrays "B K ..."."""
        del site, batch
        return ()

    def make_room(self, kv: LayerKV, ctx: Context) -> LayerKV:
        """Evicts before a decode step appends its token. Most rules evict afterwards instead."""
        del ctx
        return kv

    def appended(self, kv: LayerKV, ctx: Context) -> Any:
        """The rule's memory when a decode step has appended its token, before attention reads the layer."""
        del ctx
        return kv.memory

    def visible(self, moment: Moment) -> Bool[Array, "B K S"] | Chosen | None:
        """Live slots that the new row may read, None for all: for rules that hide tokens instead of evicting them.

        A mask costs attention what all slots cost. Slots that are named are gathered, so that a row reads those alone.

        Args:
          moment: the row and its queries, and the layer that holds its token. Nothing is measured yet.
        """
        del moment
        return None

    def finish(self, kv: LayerKV | PooledKV, ctx: Context) -> LayerKV | PooledKV:
        """Changes how the prompt's cache is stored, after eviction and compaction."""
        del ctx
        return kv

    def reserve(self, kv: LayerKV, ctx: Context) -> Int[Array, "B K"] | None:
        """The most live slots that each head will hold while decoding; None for the most that its spec allows.

        A pool gives every head that many, as far as it has them. Without such numbers, each head gets the slots it
        holds and an equal share of the rest.

        Args:
          kv: the layer after the prompt.
          ctx: the moment after the prompt.
        """
        del kv, ctx
        return None

    def check(self, site: Site, prompt_length: int) -> None:
        """See `Policy`."""
        del prompt_length
        check_init(self, dataclasses.replace(site, layer=0))

    def check_scored(self, memory: Any, site: Site, heads: np.ndarray | None = None) -> None:
        """Raises ValueError where a prompt's tokens went by scores none of which is a number, if `memory` is known.

        Args:
          memory, site: the rule's own, and the layer.
          heads: "K" the kv heads that it decides for; all of them if None.
        """
        del memory, site, heads

    def differs(self, other: "Rule") -> tuple[str, ...]:
        """What of this rule and another is not the same, the numbers of `sizes_of` aside; nothing if they are alike."""
        return () if self == other else (type(self).__name__,)

    def sizes_of(self, site: Site, lengths: np.ndarray) -> Any:
        """Numbers of tokens "B" that a rule which differs in nothing else may have in place of this rule's, or nothing.

        Args:
          site: the layer.
          lengths: of the prompts "B".
        """
        del site, lengths
        return ()

    def under(self, schedule: Schedule) -> "Rule":
        """The same rule under another schedule.

        Raises:
          ValueError: a rule whose schedule cannot change.
        """
        raise ValueError(f"{type(self).__name__} has no schedule, so {schedule} cannot apply to it")


@dataclasses.dataclass(frozen=True)
class LayerPolicy:
    """The rules of one layer, applied in turn, each with its own entry of the layer's memory.

    Attributes:
      rules: the rules.
      site: the layer that they decide for: the first one, where one decision is made for all.
    """

    rules: tuple[Rule, ...]
    site: Site

    @functools.cached_property
    def spec(self) -> LayerSpec:
        """Everything static.

        Raises:
          ValueError: rules that want different things of one cache.
        """
        return merged(self.rules, self.site)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Those of the rules."""
        return tuple(rule.spec(self.site) for rule in self.rules)

    def init(self, batch: int) -> tuple[Any, ...]:
        """The memory of a layer without slots."""
        return tuple(rule.init(self.site, batch) for rule in self.rules)

    def _each(self, kv: LayerKV | PooledKV, ctx: Context) -> Iterator[tuple[Rule, Any, Context]]:
        """Every rule, with its memory and the moment as it sees it."""
        ctx = ctx if ctx.site is self.site else dataclasses.replace(ctx, site=self.site)
        if ctx.sizes is None:
            return zip(self.rules, kv.memory, itertools.repeat(ctx, len(self.rules)), strict=True)
        own = (dataclasses.replace(ctx, sizes=sizes) for sizes in ctx.sizes)
        return zip(self.rules, kv.memory, own, strict=True)

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[tuple[Any, ...], Selection | None]:
        """The memory after a step, and what to keep, or None if nothing is evicted now."""
        decide = lambda own, ctx: LayerPolicy(self.rules, ctx.site)._decide(own[0], own[1], ctx)
        return on_devices(self.rules, decide, (kv, stats), dataclasses.replace(ctx, site=self.site))

    def _decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[tuple[Any, ...], Selection | None]:
        memories, decision, every = [], None, []
        for rule, memory, here in self._each(kv, ctx):
            memory, selection = rule.decide(dataclasses.replace(kv, memory=memory), stats, here)
            memories.append(memory)
            if selection is not None:
                kv, decision = selection.apply(kv), selection
                every.append(selection)
                if ctx.phase == "decode" and self.spec.storage == "pool":
                    check_plain(selection, "a pool changes no keys and values while decoding; use storage='dense'")
        if decision is not None and len(self.rules) > 1:
            together = kv.live, decision.score, decision.budgets, kv.gate
            plain = all(type(selection) is Selection for selection in every)
            decision = Selection(*together) if plain else InTurn(*together, each=tuple(every))
        return tuple(memories), decision

    def step(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> LayerKV:
        """One layer after one step: memory updated, slots outside the decision dead."""
        return obeying(*self.decide(kv, stats, ctx))(kv)

    def _in_turn(self, kv: Any, ctx: Context, change: Callable[[Rule, Any, Context], Any]) -> Any:
        after, memories = kv, []
        for rule, memory, here in self._each(kv, ctx):
            given = dataclasses.replace(after, memory=memory)
            found = change(rule, given, here)
            memories.append(found.memory)
            after = after if found is given else found
        if after is kv:
            return kv
        same = all(found is before for found, before in zip(memories, kv.memory, strict=True))
        return dataclasses.replace(after, memory=kv.memory if same else tuple(memories))

    def make_room(self, kv: LayerKV, ctx: Context) -> LayerKV:
        """The layer before a decode step appends its token."""
        return self._in_turn(kv, ctx, lambda rule, kv, here: rule.make_room(kv, here))

    def appended(self, kv: LayerKV, ctx: Context) -> LayerKV:
        """The layer that holds a decode step's token, before attention reads it."""
        memories = [
            rule.appended(dataclasses.replace(kv, memory=memory), here) for rule, memory, here in self._each(kv, ctx)
        ]
        same = all(after is before for after, before in zip(memories, kv.memory, strict=True))
        return kv if same else dataclasses.replace(kv, memory=tuple(memories))

    def finish(self, kv: LayerKV | PooledKV, ctx: Context) -> LayerKV | PooledKV:
        """The layer as it is stored after the prompt."""
        return self._in_turn(kv, ctx, lambda rule, kv, here: rule.finish(kv, here))

    def visible(self, moment: Moment) -> Bool[Array, "B K S"] | Chosen | None:
        """Live slots that the new row may read, None for all: those that every rule shows."""
        kv = moment.kv
        seen = lambda memory, here: dataclasses.replace(moment, kv=dataclasses.replace(kv, memory=memory), ctx=here)
        each = [rule.visible(seen(memory, here)) for rule, memory, here in self._each(kv, moment.ctx)]
        named = [shown for shown in each if isinstance(shown, Chosen)]
        masks = [shown for shown in each if shown is not None and not isinstance(shown, Chosen)]
        masks += [shown.mask(kv.num_slots) for shown in named[1:]]
        mask = functools.reduce(jnp.logical_and, masks) if masks else None
        return mask if not named else named[0] if mask is None else named[0].among(mask)

    def check_scored(self, memory: tuple[Any, ...], heads: np.ndarray | None = None) -> None:
        """Raises ValueError where a rule says so (`Rule.check_scored`)."""
        for rule, own in zip(self.rules, memory, strict=True):
            rule.check_scored(own, self.site, heads)

    def reserve(self, kv: LayerKV, ctx: Context) -> Int[Array, "B K"] | None:
        """The most live slots that each head will hold while decoding; None if no rule knows."""
        reserve = lambda rule, memory, here: rule.reserve(dataclasses.replace(kv, memory=memory), here)
        bounds = [(each[0], reserve(*each)) for each in self._each(kv, ctx)]
        if all(bound is None for _, bound in bounds):
            return None
        whole = lambda rule: jnp.full(kv.pos.shape[:2], int(rule.spec(self.site).capacity.max()), jnp.int32)
        return functools.reduce(jnp.minimum, (whole(rule) if bound is None else bound for rule, bound in bounds))


def on_devices(rules: Sequence[Rule], function: Callable[[Any, Context], Any], own: Any, ctx: Context) -> Any:
    """A function of what rules decide by, where several devices may share a layer's heads.

    Each calls it with its own, at a site that has no others, if the rules allow (`Rule.apart`); else with all of them.

    Args:
      rules: that decide.
      function: of `own` and the moment, which returns arrays "B K ...".
      own: arrays "B K ..." or "B N ...".
      ctx: the moment.
    """
    devices, site = mesh.devices(mesh.HEADS), ctx.site
    if devices == 1 or site.num_kv_heads % devices or not all(rule.apart for rule in rules):
        return mesh.everywhere(function, own, ctx)
    part = site.part(devices)

    def local(own: Any, ctx: Context) -> Any:
        return function(own, dataclasses.replace(ctx, site=part, heads=mesh.own_heads(part.num_kv_heads)))

    return mesh.by_head(local, own, ctx)


def obeying(memory: tuple[Any, ...], selection: Selection | None) -> Callable[[LayerKV], LayerKV]:
    """What a decision does to a layer."""

    def obey(kv: LayerKV) -> LayerKV:
        kv = dataclasses.replace(kv, memory=memory)
        return kv if selection is None else selection.apply(kv)

    return obey


def empty_layer(
    policy: LayerPolicy, batch: int, dtype: jax.typing.DTypeLike, positions: KeyPositions | None = None
) -> LayerKV:
    """A layer's cache without slots. Keys are stored as the policy says, or as a plan does (`CachePlan.positions`)."""
    site, spec = policy.site, policy.spec
    positions = spec.positions if positions is None else positions
    empty = jnp.zeros((batch, site.num_kv_heads, 0, site.head_dim), dtype)
    pos = jnp.zeros((batch, site.num_kv_heads, 0), jnp.int32)
    return LayerKV(
        empty,
        empty,
        pos,
        policy.init(batch),
        rank=None if positions == "original" else pos,
        rotated=pos if positions in ("rerotate", "sliding") else None,
        gate=jnp.zeros(pos.shape, float) if spec.gates else None,
        positions=positions,
    )


def as_policy(policy: Any) -> Policy:
    """The policy itself.

    Raises:
      ValueError: something else, such as a method's name.
    """
    if not isinstance(policy, Policy):
        raise ValueError(f"{policy!r} is not a policy; call a method with its budget, such as kvjax.methods.h2o(64)")
    return policy


@functools.lru_cache(maxsize=1024)
def check_init(owner: Any, site: Site) -> None:
    """Raises ValueError where what `owner.init` remembers of a layer without slots is not of slots or heads."""
    check_memory(owner, jax.eval_shape(lambda: owner.init(site, 2)), (2, site.num_kv_heads, 0), "init")


def decides_by_layer(policy: Any, composition: str) -> Policy:
    """The policy itself, which a composition of all layers makes one decision of.

    Raises:
      ValueError: no policy, or one that makes one decision for all layers already.
    """
    if as_policy(policy).shared:
        raise ValueError(
            f"{composition} makes one decision for all layers, but {policy} makes one of its own for them, which would "
            "be lost; use one of the two"
        )
    return policy


def check_moment(policy: Policy, state: Any, attn_stats: Any) -> None:
    """Raises ValueError for a state that a policy cannot be applied to, as one that decodes under another's plan."""
    if not isinstance(state, KVState) or not isinstance(attn_stats, AttentionStats):
        found = f"{type(state).__name__} and {type(attn_stats).__name__}"
        raise ValueError(f"a policy is applied to a KVState and the AttentionStats of forward(...), not to {found}")
    planned = state.plan.policy
    if policy == planned:
        return
    memory = lambda p: jax.eval_shape(lambda: [p.at(site).init(1) for site in state.plan.sites])
    if attn_stats.phase == "decode" or jax.tree.structure(memory(policy)) != jax.tree.structure(memory(planned)):
        raise ValueError(f"the state was planned for {planned}, not for {policy}; make a plan with this policy")


def context(state: KVState, layer: int, phase: Phase, tokens: Int[Array, "B T"] | None = None) -> Context:
    """The moment that `state` is at, for one layer, when `tokens` have been appended."""
    site = state.plan.sites[layer]
    sizes = None if state.sizes is None else state.sizes[layer]
    return Context(state.length, state.prompt_length, state.keys, site=site, phase=phase, ids=tokens, sizes=sizes)
