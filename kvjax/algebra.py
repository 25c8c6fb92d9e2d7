"""The algebra of policies: in turn, by layer, by kv head, one decision for all layers, other schedules.

Laws (tested over all methods): `chain` is associative with unit `identity()`; no dead slot comes back; live slots never
exceed the budget; protected tokens live; permuting slots permutes the result; a row of a padded batch gets what it
would get alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax.numpy as jnp
import numpy as np

from kvjax.by_head import ByHead
from kvjax.cache.context import Site
from kvjax.cache.state import KVState
from kvjax.pallas_kernels.values import checked, each, one_of
from kvjax.policy import (
    LayerPolicy,
    Layout,
    Policy,
    Rule,
    as_policy,
    check_moment,
    context,
    decides_by_layer,
    obeying,
)
from kvjax.scoring.stats import AttentionStats, LayerStats, Observe
from kvjax.sizes.schedule import Schedule

L = TypeVar("L", bound=Hashable)  # labels


@dataclasses.dataclass(frozen=True)
class Identity(Policy):
    """Keeps everything: the full cache."""

    def rules(self, site: Site) -> tuple[Rule, ...]:
        """None."""
        del site
        return ()


@dataclasses.dataclass(frozen=True)
class Chain(Policy):
    """Policies applied in turn; made by `chain`."""

    policies: tuple[Policy, ...]

    def rules(self, site: Site) -> tuple[Rule, ...]:
        """Those of all members."""
        return tuple(rule for p in self.policies for rule in _layerwise(p, site))


@dataclasses.dataclass(frozen=True)
class Partition(Policy):
    """A policy for every layer; made by `partition`."""

    policies: tuple[tuple[Hashable, Policy], ...]
    labels: tuple[Hashable, ...]

    def rules(self, site: Site) -> tuple[Rule, ...]:
        """Those of the layer's member."""
        if len(self.labels) != site.num_layers:
            raise ValueError(
                f"partition has {len(self.labels)} labels, but the model has {site.num_layers} layers; "
                "give one label a layer"
            )
        return _layerwise(dict(self.policies)[self.labels[site.layer]], site)


@dataclasses.dataclass(frozen=True)
class PartitionHeads(Policy):
    """A policy for every kv head of every layer; made by `partition_heads`."""

    policies: tuple[tuple[Hashable, Policy], ...]
    labels: tuple[tuple[Hashable, ...], ...]
    storage: Layout = "pool"

    def rules(self, site: Site) -> tuple[Rule, ...]:
        """One rule, which gives every head those of its member; the member's own where all heads have the same."""
        if len(self.labels) != site.num_layers:
            raise ValueError(
                f"partition_heads has labels of {len(self.labels)} layers, but the model has {site.num_layers}; give "
                "one row a layer"
            )
        here = self.labels[site.layer]
        used = [(label, _layerwise(policy, site)) for label, policy in self.policies if label in here]
        if len(used) == 1:
            return used[0][1]
        index = {label: i for i, (label, _) in enumerate(used)}
        return (ByHead(tuple(rules for _, rules in used), tuple(index[label] for label in here), self.storage),)


def _layerwise(policy: Policy, site: Site) -> tuple[Rule, ...]:
    """The rules of a member of a composition, which decides layer by layer."""
    if policy.shared:
        fix = "share the composition instead, if it is the same in all of them: shared_layers(chain(...))"
        raise ValueError(
            f"a chain or partition decides layer by layer, but its member in layer {site.layer} makes one decision for "
            f"all {site.num_layers} layers; {fix if isinstance(policy, SharedLayers) else f'use {policy} alone'}"
        )
    return policy.rules(site)


@dataclasses.dataclass(frozen=True)
class SharedLayers(Policy):
    """One decision for all layers; made by `shared_layers`."""

    shared: ClassVar[bool] = True
    alike: ClassVar[bool] = True

    policy: Policy

    def rules(self, site: Site) -> tuple[Rule, ...]:
        """Those of the first layer."""
        return self.policy.rules(_first(site))

    def at(self, site: Site) -> LayerPolicy:
        """See `Policy`; every layer holds what the first one does."""
        return LayerPolicy(self.rules(site), _first(site))

    def check(self, site: Site, prompt_length: int) -> None:
        """See `Policy`."""
        first = _first(site)
        rules = self.policy.rules(site), self.rules(site)
        if rules[0] != rules[1]:
            raise ValueError(
                f"one decision for all layers needs the same policy in all of them, but layer {site.layer} has "
                f"{list(rules[0])} and layer 0 has {list(rules[1])}; share a policy that is no partition"
            )
        here, there = (self.policy.at(s).spec for s in (site, first))
        apart = [o for o in (*here.prompt, *here.step) if not isinstance(o, Observe)]
        if apart:
            raise ValueError(
                f"one decision for all layers sums attention statistics over them, but {apart[0]} is none; "
                "share a policy whose score is made of Observe(...)"
            )
        if own := [rule for rule in self.rules(site) if type(rule).appended is not Rule.appended]:
            raise ValueError(
                f"one decision for all layers gives them one memory, but {own[0]} carries what it knows of the keys of "
                f"layer {site.layer}; use it without shared_layers"
            )
        if here.target[prompt_length] != there.target[prompt_length]:
            raise ValueError(
                f"one decision for all layers needs the same budget in all of them, but layer {site.layer} has "
                f"{here.target[prompt_length]} tokens and layer 0 has {there.target[prompt_length]}; use "
                "layers=UniformLayers()"
            )
        self.policy.check(first, prompt_length)

    def __call__(self, state: KVState, attn_stats: AttentionStats) -> KVState:
        """The first layer decides by the sum of all layers' statistics, and all do as it says."""
        check_moment(self, state, attn_stats)
        values = [layer.values for layer in attn_stats.layers]
        total = LayerStats(
            tuple(functools.reduce(jnp.add, v) for v in zip(*values, strict=True)), attn_stats.layers[0].observed
        )
        ctx = context(state, 0, attn_stats.phase, attn_stats.tokens)
        obey = obeying(*self.at(ctx.site).decide(state.layers[0].view(), total, ctx))
        return dataclasses.replace(state, layers=tuple(kv.apply(obey) for kv in state.layers))


def _first(site: Site) -> Site:
    return dataclasses.replace(site, layer=0)


def each_rule(change: Callable[[Rule], Policy], policy: Policy) -> Policy:
    """The same composition of changed rules.

    Raises:
      ValueError: a composition whose members are unknown.
    """
    again = functools.partial(each_rule, change)
    match policy:
        case Identity():
            return policy
        case Rule():
            return change(policy)
        case Chain():
            return chain(*map(again, policy.policies))
        case Partition():
            return Partition(tuple((label, again(p)) for label, p in policy.policies), policy.labels)
        case PartitionHeads():
            return PartitionHeads(
                tuple((label, again(p)) for label, p in policy.policies), policy.labels, policy.storage
            )
        case SharedLayers():
            return SharedLayers(again(policy.policy))
    if as_policy(policy).shared:
        raise ValueError(
            f"layers compete once for the budget of {policy}, when the prompt has been read: it has no other schedule "
            "and no temperature; change a policy whose layers decide by themselves"
        )
    raise ValueError(
        f"{policy} is neither a rule nor made by chain, partition, partition_heads or shared_layers; change its members"
    )


def identity() -> Policy:
    """Keeps everything. The unit of `chain`."""
    return Identity()


def chain(*policies: Policy) -> Policy:
    """Policies applied in turn at every step: a later member sees only what the earlier ones kept.

    All members read statistics of the same attention. The tightest budget wins.
    """
    flat: list[Policy] = []
    for p in policies:
        as_policy(p)
        flat += p.policies if isinstance(p, Chain) else () if isinstance(p, Identity) else (p,)
    if not flat:
        return Identity()
    return flat[0] if len(flat) == 1 else Chain(tuple(flat))


def partition(policies: Mapping[L, Policy], labels: Sequence[L]) -> Policy:
    """Different policies for different layers.

    Args:
      policies: label to policy.
      labels: one label a layer.

    Raises:
      ValueError: no mapping to policies, no labels, or a label without a policy.
    """
    every = checked(_labels, "labels", labels)
    if not every:
        raise ValueError("labels is empty; give one label a layer")
    return Partition(_labelled(policies, every), every)


def partition_heads(
    policies: Mapping[L, Policy], labels: Sequence[Sequence[L]] | np.ndarray, *, storage: Layout = "pool"
) -> Policy:
    """Different policies for different kv heads, such as DuoAttention's retrieval and streaming heads.

    Every head holds and reads what it would if all heads of its layer were under its policy ("DuoAttention: Efficient
    Long-Context LLM Inference with Retrieval and Streaming Heads", arXiv 2410.10819, keeps everything in some heads,
    sinks and a recent window in the others). In a pool it has the slots that its own policy needs: memory of heads that
    hold less is freed, and heads under `methods.full()` have room for all tokens.

    Args:
      policies: label to policy.
      labels: for every layer, one label a kv head.
      storage: "pool", or "dense" for the slots of the layer's largest head in all of them.

    Raises:
      ValueError: no mapping to policies, no labels, text in place of a layer's labels, or a label without a policy; in
        `make_plan`, labels of another number of layers or heads, policies that decide by what all heads hold, drop
        channels, hide slots, are relaxed or store sets for query heads, and policies whose `positions` differ.
    """
    rows = checked(each(_row, least=1), "labels", labels)
    if not all(rows):
        raise ValueError("labels has an empty row; give one label a kv head")
    one_of("storage", storage, "pool", "dense")
    return PartitionHeads(_labelled(policies, [label for row in rows for label in row]), rows, storage)


def _labelled(policies: Any, labels: Sequence[Hashable]) -> tuple[tuple[Hashable, Policy], ...]:
    """The policies by label, of which every label has one."""
    if not isinstance(policies, Mapping):
        raise ValueError(f"policies={policies!r}: give a mapping from labels to policies")
    for policy in policies.values():
        as_policy(policy)
    unknown = sorted({str(label) for label in labels if label not in policies})
    if unknown:
        raise ValueError(f"labels {unknown} have no policy; the policies are for {sorted(map(str, policies))}")
    return tuple(policies.items())


def _labels(labels: Any) -> tuple[Hashable, ...]:
    """The rule of labels: a string has one a letter."""
    return each(_label)(list(labels) if isinstance(labels, str) else labels)


def _row(labels: Any) -> tuple[Hashable, ...]:
    """The rule of a layer's labels: a string would have one a letter, which is seldom what it means."""
    if isinstance(labels, str):
        raise ValueError(f"{labels!r} is one text, not a layer's labels; give a list of one label a kv head")
    return each(_label)(labels)


def _label(label: Hashable) -> Hashable:
    """The rule of labels: what a mapping can be asked for."""
    if not isinstance(label, Hashable):
        raise ValueError(f"{label!r} cannot be a label; use a name or a number")
    return label.item() if isinstance(label, np.generic) else label


def when(schedule: Schedule, policy: Policy) -> Policy:
    """The same policy (every rule of it) under another schedule.

    Raises:
      ValueError: arguments of other kinds or in another order, or a policy whose schedule cannot change.
    """
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{schedule!r} is not a schedule; write when(schedule, policy), such as when(every(16), ...)")
    as_policy(policy)
    return each_rule(lambda rule: rule.under(schedule), policy)


def shared_layers(policy: Policy) -> Policy:
    """One score, summed over layers as well as rows, and one decision that every layer applies.

    Keyformer's shared score (arXiv 2403.09054, section 3.3, D-35), and the uniform ablation of NaCl. The whole prompt's
    keys and values of all layers exist until the decision is made, so peak memory grows with depth. A score that looks
    at keys sees those of the first layer.

    Raises:
      ValueError: what is no policy, or one of `across_layers`, whose layers keep different numbers of tokens, or of
        `shared_layers`; in `make_plan`, a policy that measures something that cannot be summed over layers,
        or layers of different budgets.
    """
    return SharedLayers(decides_by_layer(policy, "shared_layers"))
