"""What a policy keeps of a prompt at many budgets and seeds, from one reading.

Policies that differ in budgets alone (most methods) are traced once: their whole numbers of tokens are stacked into
tables, and which budget is meant becomes a traced index into them, over which the decision is vmapped. Everything that
does not depend on the budget, scores above all, is computed once. Other policies decide budget by budget.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.analysis.reading import LayerReading, Measured, Reading, depends
from kvjax.cache.state import KVState, LayerKV, Positions, map_slots
from kvjax.eviction import Evict, Numbers
from kvjax.plan import CachePlan, ModelConfig, make_plan
from kvjax.policy import Granularity, Policy, Rule, as_policy
from kvjax.scoring.select import Selection
from kvjax.scoring.stats import AttentionStats, LayerStats
from kvjax.sizes.budget import Count, Counts, lookup, narrow

Method = Callable[[Any], Policy]
"""Budget to policy."""


def make_grid(
    config: ModelConfig,
    by_name: Mapping[str, Method],
    budgets: Sequence[int | float | Count],
    *,
    prompt_len: int,
    max_new_tokens: int,
    lengths: np.ndarray | None,
) -> tuple[tuple[CachePlan, ...], ...]:
    """The plans of every method at every budget.

    Raises:
      ValueError: no methods or budgets, what is no policy, policies that do more than keep tokens, and what `make_plan`
        refuses.
    """
    if not isinstance(by_name, Mapping) or not isinstance(budgets, Sequence | np.ndarray):
        raise ValueError(f"policies={by_name!r}, budgets={budgets!r}: give methods by name and a list of budgets")
    if not by_name or not len(budgets):
        raise ValueError(f"{len(by_name)} policies at {len(budgets)} budgets: give at least one of each")
    plan = functools.partial(make_plan, config, prompt_len=prompt_len, max_new_tokens=max_new_tokens, lengths=lengths)
    grid = []
    for name, method in by_name.items():
        if isinstance(method, Policy) or not callable(method):
            raise ValueError(f"{name!r} is {method!r}; give a method that takes a budget, such as kvjax.methods.snapkv")
        plans = tuple(plan(as_policy(method(budget))) for budget in budgets)
        for p in plans:
            _check_keeps_tokens(name, p)
        if len(kinds := {kind_of(p) for p in plans}) > 1:
            raise ValueError(f"{name!r} has slots of different kinds at different budgets, {kinds}; measure them apart")
        grid.append(plans)
    return tuple(grid)


def _check_keeps_tokens(name: str, plan: CachePlan) -> None:
    """Raises ValueError if the policy does something to later rows that no keep mask says."""
    for site in plan.sites:
        for rule in plan.policy.rules(site):
            spec = rule.spec(site)
            does = {
                "hides tokens from single rows": spec.hides is not None,
                "changes how keys are stored": type(rule).finish is not Rule.finish,
                "keeps a part of every token": spec.gates,
                "decides by rows that read the prompt again": bool(spec.replays),
            }
            for what in (what for what, true in does.items() if true):
                raise ValueError(f"{name!r} {what}, which is no choice of tokens; no keep mask has its losses")


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a policy's slots are: masks of one kind are measured together."""

    granularity: Granularity
    positions: Positions


def kind_of(plan: CachePlan) -> Kind:
    """The kind of a plan's masks.

    Raises:
      ValueError: layers of different kinds.
    """
    heads = {spec.heads for spec in plan.specs}
    moved: set[Positions] = {"original" if p == "original" else "compact" for p in plan.positions}
    if len(heads) > 1 or len(moved) > 1:
        raise ValueError(
            f"the layers of {plan.policy} have slots of several kinds ({sorted(heads)}, {sorted(moved)}), and one mask "
            "has one; give all of them the same granularity= and positions="
        )
    return Kind(heads.pop(), moved.pop())


def measurements(plans: Sequence[CachePlan]) -> tuple[Measured, ...]:
    """What a reading must measure in every layer, for all of these plans' policies."""
    layers = []
    for i in range(len(plans[0].sites)):
        wanted = {(p.specs[i].heads, m) for p in plans for m in p.specs[i].prompt}
        layers.append(tuple(sorted(wanted, key=repr)))
    return tuple(layers)


def _layer_kv(layer: LayerReading, plan: CachePlan, i: int) -> LayerKV:
    """The prompt's full cache with a policy's memory as it is when the prompt has been appended."""
    kv = layer.cache(plan.specs[i].heads, plan.specs[i].positions)
    T = kv.num_slots
    grow = lambda m: jnp.pad(m, [(0, 0), (0, 0), (0, T)] + [(0, 0)] * (m.ndim - 3))
    return dataclasses.replace(kv, memory=map_slots(grow, plan.layers[i].init(kv.pos.shape[0])))


def _stats(layer: LayerReading, plan: CachePlan, i: int, drawn: dict[str, LayerStats]) -> LayerStats:
    """What a policy asked to see."""
    spec = plan.specs[i]
    found = [s[spec.heads] for s in (layer.stats, drawn) if spec.heads in s]
    wanted = spec.prompt
    if missing := [m for m in wanted if not any(m in s.observed for s in found)]:
        raise ValueError(
            f"{plan.policy} asks for {len(wanted)} measurements in layer {i}, of which the reading lacks {missing}; "
            "read with measure=analysis.measurements([plan])"
        )
    value = lambda m: next(s[m] for s in found if m in s.observed)
    return LayerStats(tuple(value(m) for m in wanted), wanted)


def decisions(plan: CachePlan, reading: Reading, seed: int = 0) -> tuple[Selection, ...]:
    """What a policy decides about the prompt in every layer by itself, with what it ranked the prompt's slots by.

    Args:
      plan: the policy's.
      reading: with the measurements that it asks for (`measurements`).
      seed: which draw of what is random.

    Raises:
      ValueError: a policy that does not evict after the prompt, a reading that lacks what it asks for.
    """
    selections = []
    for i, layer in enumerate(reading.layers):
        drawn = jax.tree.map(lambda x: x[seed], layer.drawn)
        kv, stats = _layer_kv(layer, plan, i), _stats(layer, plan, i, drawn)
        ctx = dataclasses.replace(reading.prompt_context(i, seed), site=plan.sites[i])
        _, selection = plan.layers[i].decide(kv, stats, ctx)
        if selection is None:
            raise ValueError(f"{plan.policy} evicts nothing after the prompt; use when=after_prefill()")
        selections.append(selection)
    return tuple(selections)


def keep_one(plan: CachePlan, reading: Reading, seed: int | Int[Array, ""] = 0) -> Bool[Array, "L B heads T"]:
    """What any policy keeps after the prompt, in every layer."""
    drawn = [jax.tree.map(lambda x: x[seed], layer.drawn) for layer in reading.layers]
    return _keep_one(plan, reading, reading.keys[seed], drawn)


def _keep_one(plan: CachePlan, reading: Reading, keys, drawn) -> Bool[Array, "L B heads T"]:
    each = list(enumerate(zip(reading.layers, drawn, strict=True)))
    layers = tuple(_layer_kv(layer, plan, i) for i, (layer, _) in each)
    stats = tuple(_stats(layer, plan, i, d) for i, (layer, d) in each)
    state = KVState(layers, reading.lengths, reading.lengths, jnp.int32(0), keys, plan=plan)
    after = plan.policy(state, AttentionStats(stats, phase="prefill"))
    return jnp.stack([kv.live for kv in after.layers])


def stackable(policies: Sequence[Policy]) -> bool:
    """Whether policies differ only in how many tokens they keep, so that one trace serves all of them."""
    first = policies[0]
    if not isinstance(first, Evict) or not first.when.prefill:
        return False
    return all(isinstance(p, Evict) and not first.differs(p) for p in policies)


@dataclasses.dataclass(frozen=True)
class _StackedCounts(Counts):
    """Counts of one among several policies.

    Attributes:
      budget_table: a row for every policy.
      index: which policy is meant.
    """

    index: Int[Array, ""]

    def table(self, count: int | float | Count) -> np.ndarray:
        """See `Counts`; a row for every policy."""
        each = (Counts(budgets, self.prompt_length).table(count) for budgets in self.budget_table)
        return np.stack(list(each))

    def __call__(self, count: int | float | Count) -> Int[Array, "B"]:
        """See `Counts`."""
        return _pick(self.table(count), self.index, self.prompt_length)


def _pick(tables: np.ndarray, index: Int[Array, ""], prompt_length: Int[Array, "B"]) -> Int[Array, "B"]:
    """`tables[index, prompt_length]`; does not depend on the index where no row does."""
    if (tables == tables[:1]).all():
        return lookup(tables[0], prompt_length)
    return jnp.asarray(narrow(tables))[index].at[prompt_length].get(mode="clip")


def _keep_stacked(plans: Sequence[CachePlan], reading: Reading, keys, drawn) -> Bool[Array, "M L B heads T"]:
    """`_keep_one` of policies that are `stackable`."""
    policies: Any = [plan.policy for plan in plans]
    first: Evict = policies[0]
    layers = []
    for i, (layer, d) in enumerate(zip(reading.layers, drawn, strict=True)):
        kv, stats = _layer_kv(layer, plans[0], i), _stats(layer, plans[0], i, d)
        ctx = dataclasses.replace(reading.prompt_context(i), keys=keys, site=plans[0].sites[i])
        tables = [p.tables(plans[0].sites[i]) for p in policies]
        budget, sinks, recent = (np.stack([t[j] for t in tables]) for j in range(3))
        (memory,) = kv.memory
        memory = first.updated(memory, kv, stats, ctx)

        def one(m, kv=kv, stats=stats, ctx=ctx, memory=memory, budget=budget, sinks=sinks, recent=recent):
            n = ctx.prompt_length
            counts = _StackedCounts(budget, n, m)
            numbers = Numbers(_pick(budget, m, n), _pick(sinks, m, n), _pick(recent, m, n), int(budget.max()), counts)
            return kv.live & first.select_prompt(memory, kv, stats, ctx, numbers).keep

        layers.append(jax.vmap(one)(jnp.arange(len(plans), dtype=jnp.int32)))
    return jnp.stack(layers, axis=1)


def keep_all(plans: Sequence[CachePlan], reading: Reading) -> Bool[Array, "M seeds L B heads T"]:
    """What a method keeps at every budget and, if it draws anything, for every seed; one seed if it does not.

    The same masks as `kvjax.evict_layer` gives for every policy, layer and seed by itself.

    Args:
      plans: the method at every budget.
      reading: with the measurements that its policies ask for (`measurements`).
    """

    def keep(drawn_by: tuple[Any, Any]) -> Bool[Array, "M L B heads T"]:
        keys, drawn = drawn_by
        if stackable([p.policy for p in plans]):
            return _keep_stacked(plans, reading, keys, drawn)
        return jnp.stack([_keep_one(plan, reading, keys, drawn) for plan in plans])

    drawn_by = (reading.keys, [layer.drawn for layer in reading.layers])
    if depends(keep, drawn_by):
        return jax.vmap(keep, out_axes=1)(drawn_by)
    return keep(jax.tree.map(lambda x: x[0], drawn_by))[:, None]
