"""Policies made of policies: in turn, by layer, by kv head, under another schedule."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from kvjax.budgets import Schedule
from kvjax.compose.around import having
from kvjax.compose.evict import Evict, evicts
from kvjax.contract import (
    LAST,
    AttentionInputs,
    Context,
    Count,
    LayerInfo,
    LayerView,
    Layout,
    Observation,
    Phase,
    Policy,
    Reads,
    Sizes,
    Stats,
    unique,
)
from kvjax.decide.select import ThenRandom, TwoStage
from kvjax.scores.attention import Function, Recency
from kvjax.scores.blends import LayerMean

Change = Callable[[Policy, LayerView, Context], LayerView]  # what becomes of a member's layer


def refuse_joint(policies: Sequence[Policy], where: str) -> None:
    """Refuses policies that decide for all layers at once, as members of another one."""
    if wrong := [p for p in policies if p.joint]:
        raise ValueError(
            f"{type(wrong[0]).__name__} decides for all layers at once, so it cannot be a member of {where}"
        )


class _Members(Policy):
    """A policy that hands each of its members the member's own hparams, params and memory.

    Attributes:
      members: the policies.
    """

    members: tuple[Policy, ...]

    def __post_init__(self):
        refuse_joint(self.members, type(self).__name__)
        if len({p.layout.positions for p in self.members} - {"original"}) > 1:
            raise ValueError("the members of a composition store tokens at different positions")
        if len(codecs := unique(p.layout.codec for p in self.members if p.layout.codec is not None)) > 1:
            raise ValueError(f"the members of a composition store tokens by {codecs[0]} and {codecs[1]}; give one")

    @property
    def layout(self) -> Layout:
        """The layouts of the members joined: positions of the one that changes them, a pool if one wants it."""
        each = [p.layout for p in self.members]
        placed = next((x for x in each if x.positions != "original"), each[0])
        return Layout(
            placed.positions,
            max(x.sinks for x in each),
            any(x.pool for x in each),
            any(x.by_query_head for x in each),
            max((x.prompt for x in each), key=("any", "whole", "rows").index),
            next((x.codec for x in each if x.codec is not None), None),
        )

    @property
    def writes(self) -> tuple[str, ...]:
        """Fields of a slot that any member may change."""
        return unique(n for p in self.members for n in p.writes)

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        """Observations of all members."""
        return unique(o for p in self.members for o in p.observe(phase))

    def memory(self, info: LayerInfo) -> PyTree:
        """The memory of each member."""
        return tuple(p.memory(info) for p in self.members)

    def init_params(self, info: LayerInfo, key: Key[Array, ""]) -> PyTree:
        """The learned parameters of each member; () if no member has any."""
        keys = jax.random.split(key, len(self.members))
        found = tuple(p.init_params(info, k) for p, k in zip(self.members, keys, strict=True))
        return found if jax.tree.leaves(found) else ()

    def own(self, i: int, kv: LayerView, ctx: Context) -> tuple[LayerView, Context]:
        """The layer and the moment as member `i` sees them."""
        params = ctx.params[i] if ctx.params else ()
        return kv.replace(memory=kv.memory[i]), dataclasses.replace(ctx, hparams=ctx.hparams[i], params=params)

    def _each(self, kv: LayerView, ctx: Context, change: Change) -> LayerView:
        """The layer after a change by every member."""
        raise NotImplementedError

    def enter(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> LayerView:
        """The layer after every member has taken in the new rows."""
        return self._each(kv, ctx, lambda p, kv, ctx: p.enter(kv, inputs, ctx))

    def update(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        """The layer after every member has decided."""
        return self._each(kv, ctx, lambda p, kv, ctx: p.update(kv, stats, ctx))

    def _each_reads(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> list[Reads | None]:
        return [p.reads(own, inputs, mine) for i, p in enumerate(self.members) for own, mine in [self.own(i, kv, ctx)]]


class Chain(_Members):
    """Policies in turn at every step: a later one sees what the earlier ones kept.

    Attributes:
      members: the policies, the first one first.
    """

    def __post_init__(self):
        super().__post_init__()
        if any(p.layout.positions == "shifted" for p in self.members):
            raise ValueError('first tokens can be shifted where nothing else evicts; use positions="rank" in a chain')
        gates = [any("log_weight" in x.select.writes for x in evicts(p)) for p in self.members]
        first = gates.index(True) if True in gates else len(gates)
        hard = [x for i, p in enumerate(self.members) if not gates[i] for x in evicts(p) if i > first or x.when.decodes]
        if first < len(gates) and hard:
            raise ValueError(
                f"a relaxed member of a chain keeps some of every slot, each of which {type(hard[0].score).__name__} "
                "counts as a token; relax all, soften(chain(...), temperature), or let what is hard evict the prompt "
                "first, and nothing later"
            )

    def at(self, layer: int, num_layers: int) -> Policy:
        """The chain of the members' policies for that layer."""
        return chain(*(p.at(layer, num_layers) for p in self.members))

    def sizes(self, info: LayerInfo, lengths: Int[np.ndarray, "M"]) -> Sizes:
        """Room for what the member with the smallest budget keeps."""
        each = [p.sizes(info, lengths) for p in self.members]
        return Sizes(
            np.minimum.reduce([x.per_head for x in each]),
            np.minimum.reduce([x.total for x in each]),
            tuple(x.hparams for x in each),
        )

    def _each(self, kv: LayerView, ctx: Context, change: Change) -> LayerView:
        for i, p in enumerate(self.members):
            own, mine = self.own(i, kv, ctx)
            found = change(p, own, mine)
            if found is not own:
                kv = found.replace(memory=(*kv.memory[:i], found.memory, *kv.memory[i + 1 :]))
        return kv

    def reads(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> Reads | None:
        """The slots that all members read; weights are multiplied.

        Raises:
          ValueError: two members that name slots by number, or that weigh slots after different delays.
        """
        each = [x for x in self._each_reads(kv, inputs, ctx) if x is not None]
        given = lambda name: [y for x in each if (y := getattr(x, name)) is not None]
        masks, untils = given("visible"), given("until")
        weights = [(x.log_weight, x.delay) for x in each if x.log_weight is not None]
        if len(masks) > 1 and any(x.dtype != bool for x in masks):
            raise ValueError("two members of a chain name slots to read; let them give masks")
        if any(x[1] is not weights[0][1] and x[1] != weights[0][1] for x in weights if not hasattr(x[1], "shape")):
            raise ValueError("two members of a chain weigh slots after different delays")
        reduce = lambda f, x: functools.reduce(f, x) if x else None
        weight = reduce(jnp.add, [x for x, _ in weights])
        found = Reads(
            reduce(jnp.logical_and, masks) if len(masks) > 1 else masks[0] if masks else None,
            reduce(jnp.minimum, untils),
            weight,
            weights[0][1] if weights else 0,
            *(given("at") if len(masks) == 1 and not (untils or weights) else []),
        )
        return found if each else None

    def reserve(self, kv: LayerView, ctx: Context) -> Int[Array, "B K"]:
        """The least that any member lets a head grow to."""
        return functools.reduce(jnp.minimum, [p.reserve(*self.own(i, kv, ctx)) for i, p in enumerate(self.members)])


class ByHead(_Members):
    """Every kv head of a layer under a policy of its own, as if all heads were under it.

    Attributes:
      members: the policies.
      heads: for every kv head, the index of its member.
      pool: whether the heads' slots lie in one pool, so that heads with small budgets take little memory.
    """

    heads: tuple[int, ...]
    pool: bool = False

    @property
    def layout(self) -> Layout:
        """The layouts of the members joined, in a pool if asked for."""
        joined = super().layout  # in which first tokens cannot be shifted, as heads keep other tokens too
        positions = "rank" if joined.positions == "shifted" else joined.positions
        return dataclasses.replace(joined, pool=self.pool, positions=positions, sinks=0)

    def at(self, layer: int, num_layers: int) -> Policy:
        """The same of the members' policies for that layer."""
        return dataclasses.replace(self, members=tuple(p.at(layer, num_layers) for p in self.members))

    def sizes(self, info: LayerInfo, lengths: Int[np.ndarray, "M"]) -> Sizes:
        """Room for the largest member in every head, and for each head's own member in a pool.

        Raises:
          ValueError: another number of heads than the layer has.
        """
        if len(self.heads) != info.num_kv_heads:
            raise ValueError(
                f"partition_heads has {len(self.heads)} labels in layer {info.layer}, which has {info.num_kv_heads} kv "
                "heads; give one label a head"
            )
        each = [p.sizes(info, lengths) for p in self.members]
        return Sizes(
            np.maximum.reduce([x.per_head for x in each]),
            np.sum([each[i].per_head for i in self.heads], axis=0),
            tuple(x.hparams for x in each),
        )

    def pick(self, each: Sequence[Array]) -> Array:
        """Of arrays "B K ..." of the members, for every head its own member's."""
        mine = lambda i, x: (jnp.asarray(self.heads) == i).reshape(1, -1, *(1,) * (x.ndim - 2))
        return functools.reduce(lambda x, i: jnp.where(mine(i, x), each[i], x), range(1, len(each)), each[0])

    def _each(self, kv: LayerView, ctx: Context, change: Change) -> LayerView:
        own = [self.own(i, kv, ctx) for i in range(len(self.members))]
        found = [change(p, *x) for p, x in zip(self.members, own, strict=True)]
        if all(x is y for x, (y, _) in zip(found, own, strict=True)):
            return kv
        if any(x.channels is not kv.channels for x in found):
            raise ValueError("a member for some heads drops key channels, which a layer stores alike in all its heads")
        picked = {n: self.pick([getattr(x, n) for x in found]) for n in ("pos", "fault", *self.writes)}
        return kv.replace(memory=tuple(x.memory for x in found), **picked)

    def reads(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> Reads | None:
        """The slots that every head's own member reads.

        Raises:
          ValueError: a member that names slots by number.
        """
        each = self._each_reads(kv, inputs, ctx)
        if all(x is None for x in each):
            return None
        each = [x or Reads() for x in each]
        wide = lambda x, fill: jnp.broadcast_to(jnp.asarray(fill if x is None else x), kv.pos.shape)
        if any(x.visible is not None and x.visible.dtype != bool for x in each):
            raise ValueError("a member for some heads names slots to read; let it give a mask")

        def pick(name: str, fill: float) -> Array | None:
            given = [getattr(x, name) for x in each]
            return None if all(x is None for x in given) else self.pick([wide(x, fill) for x in given])

        weight = pick("log_weight", 0.0)
        delay = 0 if weight is None else self.pick([wide(x.delay, 0) for x in each])
        return Reads(pick("visible", True), pick("until", LAST), weight, delay)

    def reserve(self, kv: LayerView, ctx: Context) -> Int[Array, "B K"]:
        """How far every head's own member lets it grow."""
        return self.pick([p.reserve(*self.own(i, kv, ctx)) for i, p in enumerate(self.members)])


class PerLayer(Policy):
    """A policy for every layer. A layer asks only its own, so nothing but `at` is needed.

    Attributes:
      policies: one a layer.
    """

    policies: tuple[Policy, ...]

    def __post_init__(self):
        refuse_joint(self.policies, "a partition of layers")

    def at(self, layer: int, num_layers: int) -> Policy:
        """The policy given for that layer."""
        if len(self.policies) != num_layers:
            raise ValueError(f"there are {len(self.policies)} labels for {num_layers} layers; give one a layer")
        return self.policies[layer].at(layer, num_layers)


def chain(*policies: Policy) -> Policy:
    """Policies in turn at every step, each of which sees what those before it kept; `chain()` keeps everything.

    Raises:
      ValueError: members that store tokens at different positions, or that decide for all layers at once.
    """
    flat = [q for p in policies for q in (p.members if isinstance(p, Chain) else () if type(p) is Policy else (p,))]
    return Policy() if not flat else flat[0] if len(flat) == 1 else Chain(tuple(flat))


def _refuse_unknown(policies: Mapping[Any, Policy], labels: Sequence[Hashable]) -> None:
    if not isinstance(labels, Sequence | np.ndarray):
        raise ValueError(f"labels is a {type(labels).__name__}; give a list with the label of every layer")
    if unknown := [x for x in labels if not isinstance(x, Hashable) or x not in policies]:
        raise ValueError(f"there is no policy with the label {unknown[0]!r}, but with {', '.join(map(repr, policies))}")


def partition(policies: Mapping[Any, Policy], labels: Sequence[Hashable]) -> Policy:
    """Different policies for different layers.

    Args:
      policies: by label.
      labels: the label of every layer.

    Raises:
      ValueError: a label without a policy, or a policy that decides for all layers at once.
    """
    _refuse_unknown(policies, labels)
    return PerLayer(tuple(policies[label] for label in labels))


def partition_heads(
    policies: Mapping[Any, Policy], labels: Sequence[Sequence[Hashable]], *, pool: bool = True
) -> Policy:
    """Different policies for different kv heads.

    Args:
      policies: by label.
      labels: for every layer, the label of each of its kv heads.
      pool: whether the slots of a layer's heads lie in one pool; a layer with one label for all heads needs none.

    Raises:
      ValueError: a label without a policy, or a policy that decides for all layers at once.
    """
    _refuse_unknown(policies, [label for row in labels for label in row])

    def of_layer(row: Sequence[Hashable]) -> Policy:
        names = list(dict.fromkeys(row))
        if len(names) == 1:
            return policies[names[0]]
        return ByHead(tuple(policies[n] for n in names), tuple(map(names.index, row)), pool)

    return PerLayer(tuple(map(of_layer, labels)))


def when(schedule: Schedule | Callable[[Schedule], Schedule], policy: Policy) -> Policy:
    """The same policy under another schedule: every policy inside it that has a field `when` gets this one.

    Args:
      schedule: at which steps to evict, or what becomes of the schedule that there is.
      policy: a policy that has a schedule, or is made of some that have.

    Raises:
      ValueError: no policy inside has a schedule.
    """
    if not having(policy, "when"):
        raise ValueError(f"{type(policy).__name__} has no schedule")
    new = schedule if callable(schedule) and not isinstance(schedule, type | Policy) else lambda _: schedule
    return everywhere(policy, Policy, "when", lambda fields: {"when": new(fields["when"])})


def protect(policy: Policy, *, sinks: Count | None = None, recent: Count | None = None, prompt: bool = False) -> Policy:
    """The same policy with other tokens that always stay, so that methods can be compared with equal ones.

    What stays counts against the budget: one that holds the prompt and `recent` tokens is needed where `prompt` pins
    it. `Combined("sum", (1.0, 64))` is the prompt and 64 tokens more, whatever its length.

    Args:
      policy: a policy that keeps some, or is made of some that do.
      sinks, recent: how many first and last tokens stay in every such policy; None for as many as with it.
      prompt: whether every token of the prompt stays, so that generated ones alone are evicted. First tokens are then
        no longer shifted: `streaming_llm` has its tokens at their ranks.

    Raises:
      ValueError: no policy inside keeps tokens by position; sinks beside a whole prompt. Runs with a budget that does
        not hold the prompt are refused, too, before anything is traced.
    """
    if not having(policy, "sinks"):
        raise ValueError(f"{type(policy).__name__} keeps no tokens by position alone, so that none can be others")
    if prompt and sinks is not None:
        raise ValueError(f"prompt=True keeps all of the prompt, of which sinks={sinks} are the first; give one of them")
    given = {n: x for n, x in (("sinks", 1.0 if prompt else sinks), ("recent", recent)) if x is not None}

    def changed(fields: dict[str, Any]) -> dict[str, Any]:
        shifted = prompt and "layout" in fields and fields["layout"].positions == "shifted"
        return given | ({"layout": dataclasses.replace(fields["layout"], positions="rank", sinks=0)} if shifted else {})

    return everywhere(policy, Policy, "sinks", changed)


def shared_heads(policy: Policy) -> Policy:
    """The same policy with one set of tokens for all kv heads of a layer, by the mean of their scores.

    Engines store a layer's tokens so: one table of blocks for all heads. Draws are the same in all heads.

    Args:
      policy: an `Evict`, or a policy that is made of some.

    Raises:
      ValueError: nothing inside ranks tokens; heads have budgets or policies of their own, or a selection that weighs
        each head's tokens.
    """
    found = evicts(policy)
    own = [p.heads if isinstance(p, Evict) else p for p in having(policy, "heads") if p.heads is not None]
    own = own or [p.select for p in found if isinstance(p.select, TwoStage)]
    if own or not found:
        why = f"{type(own[0]).__name__} decides for each by itself" if own else f"{type(policy).__name__} ranks none"
        raise ValueError(f"all kv heads are to keep one set of tokens, but {why}; give an Evict with heads=None")
    mean = lambda score: score if isinstance(score, Recency) else LayerMean(score)

    def changed(fields: dict[str, Any]) -> dict[str, Any]:
        select = fields["select"]
        if isinstance(select, ThenRandom):
            first = None if select.first is None else mean(select.first)
            select = dataclasses.replace(select, shared=True, first=first)
        return {"score": mean(fields["score"]), "select": select}

    return everywhere(policy, Policy, "score", changed)


def everywhere(x: Any, kind: Any, field: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A value in which every one of a kind that has a field gets others, made from all of its fields."""
    if isinstance(x, tuple):
        return tuple(everywhere(y, kind, field, change) for y in x)
    if not isinstance(x, kind):
        return x
    each = {f.name: everywhere(getattr(x, f.name), kind, field, change) for f in dataclasses.fields(x)}
    return dataclasses.replace(x, **(each | change(each) if field in each else each))


def from_fn(fn: Callable[..., Array], budget: Count, *, observe: tuple[Observation, ...] = (), **fields: Any) -> Evict:
    """A policy that ranks tokens by a function.

    Args:
      fn: `(kv, stats, ctx) -> "B K S"`, from the layer, what was observed, and the moment; the larger number stays.
        Policies share programs where this is the same object: define it once, outside of a loop over budgets, as a
        lambda that is made anew compiles anew.
      budget: tokens of a kv head, on average.
      observe: what it wants to see.
      **fields: other fields of `Evict`, such as `sinks=4` or `when=Schedule(every=16)`.
    """
    return Evict(Function(fn, observe), budget, **fields)
