"""Relaxed policies: gates in [0, 1] in place of evictions, so that a loss has a gradient with respect to budgets.

A hard policy keeps a slot or drops it. A relaxed one keeps some of every slot: attention reads a slot with its gate as
weight (`log_weight`). As the temperature falls, gates become the hard policy's mask; at every temperature those of a
head add up to its budget.

    policy = soften(methods.snapkv(64), temperature=4.0)

    def loss(budgets):  # "L K", tokens, real numbers
        state = start(model, policy=policy, lengths=lengths, max_new_tokens=8)
        _, state, _ = forward(model, params, prompts, with_budgets(state, budgets), valid=lengths, evict=True)
        logits, _, _ = forward(model, params, answers, state)
        return task_loss(logits, targets).mean()

    jax.grad(loss)(budgets)

Letters: B sequences, L layers, K kv heads, S slots.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.budgets import HeadShares, LayerShares
from kvjax.compose.evict import Evict
from kvjax.contract import MOST, LayerInfo, Policy, Prompts, Select, Slots, data
from kvjax.decide.select import ThenRandom, TopK, TwoStage
from kvjax.learning.soft import Pass, check_temperature, soft_passes
from kvjax.pallas_kernels import kinds
from kvjax.pallas_kernels.pytree import pytree
from kvjax.run.state import State


@pytree
class Softness:
    """The data of a relaxed policy in one layer. Traced numbers have gradients, and other ones compile nothing new.

    Attributes:
      temperature: how many tokens the border between kept and lost is wide.
      budgets: tokens of each head, protected ones included, in place of the policy's own; None for those.
      select: the data of the selection that is relaxed.
    """

    temperature: Float[Array, "B"]
    budgets: Float[Array, "B K"] | None = None
    select: PyTree = ()


class Soft(Select):
    """A selection with a temperature: it gives gates in place of a mask, and never more than a slot has already.

    Protected slots keep what they have; passes of `soft_top_k` divide the rest of the budget.

    Attributes:
      select: the selection that is relaxed: `TopK`, `ThenRandom` or `TwoStage`.
      temperature: how many tokens the border between kept and lost is wide.
    """

    select: Select = TopK()
    temperature: float = data(default=1.0)

    slack = MOST  # all slots keep something
    writes = ("log_weight",)

    def __post_init__(self):
        check_temperature(self.temperature)
        if type(self.select) not in _RELAXED:
            raise ValueError(
                f"{type(self.select).__name__} is not known to select by passes of top-k, so it has no temperature; "
                f"relax one of {', '.join(kind.__name__ for kind in _RELAXED)}"
            )

    def hparams(self, info: LayerInfo, lengths: Prompts, budget: Prompts) -> Softness:
        temperature = jnp.full(len(lengths), self.temperature, float)
        return Softness(temperature, None, self.select.hparams(info, lengths, budget))

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Float[Array, "B K S"]:
        kv, soft, safe = slots.kv, slots.hparams, slots.protected
        have = jnp.where(kv.live, jnp.exp(jnp.zeros(kv.pos.shape) if kv.log_weight is None else kv.log_weight), 0.0)
        real = lambda x: x.astype(have.dtype)
        total = real(budgets if soft.budgets is None else soft.budgets)
        width = real(soft.temperature)[:, None]
        secure = jnp.where(safe, have, 0.0)
        first = Pass(real(kv.pos), jnp.minimum(total, secure.sum(-1)))
        kept = soft_passes((first,), kv.pos, secure, temperature=width)
        rest = jnp.maximum(total - kept.sum(-1), 0.0)
        passes = self._passes(score, total, rest, slots.of("select"))
        return kept + soft_passes(passes, kv.pos, have - secure, temperature=width)

    def _passes(self, score: Array, budgets: Array, rest: Array, slots: Slots) -> tuple[Pass, ...]:
        """The selection as passes of top-k over the `rest` of budgets "B K" that protected slots leave."""
        select = self.select
        if isinstance(select, ThenRandom):
            random = jnp.minimum(slots.hparams.random[:, None].astype(rest.dtype), rest)
            return Pass(select.rank(score, slots), rest - random), Pass(select.drawn(score, slots), random)
        if isinstance(select, TwoStage):
            size = jnp.maximum(jnp.floor(budgets * select.first + 1e-6), float(select.first > 0))
            first = jnp.clip(size - (budgets - rest), 0.0, rest)
            return Pass(score, first), Pass(select.weighed(score, slots), rest - first)
        return (Pass(score, rest),)


_RELAXED = TopK, ThenRandom, TwoStage  # a subclass may select in another way


# --------------------------------------------------------------------------------------------------------- policies


def soften(policy: Policy, temperature: float) -> Policy:
    """The same policy with gates in place of evictions.

    Nothing is evicted, so its caches hold every token. While decoding, gates multiply: no slot gets back what it lost.

    Args:
      policy: an `Evict`, or a composition of such: chains, partitions, shared layers. Full caches in it stay.
      temperature: how many tokens the border between kept and lost is wide.

    Raises:
      ValueError: a temperature that is not positive, a policy that does not keep the best of a score, that counts on
        slots that are live or dead and nothing between, or that rewrites what slots hold.
    """
    if type(policy) is Policy:
        return policy
    if isinstance(policy, Evict):
        return _softened(policy, temperature)
    members = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
    relaxed = lambda x: tuple(map(relaxed, x)) if isinstance(x, tuple) else soften(x, temperature)
    found = {n: relaxed(x) for n, x in members.items() if _is_made_of_policies(x)}
    if not found:
        raise ValueError(
            f"{type(policy).__name__} does not keep the best of a score, so it has no temperature; soften an Evict"
        )
    return dataclasses.replace(policy, **found, **({"pool": False} if "pool" in members else {}))


def _is_made_of_policies(x: object) -> bool:
    return isinstance(x, Policy) or (isinstance(x, tuple) and bool(x) and all(isinstance(y, Policy) for y in x))


def _softened(policy: Evict, temperature: float) -> Evict:
    select, layout = policy.select, policy.layout
    reason = ""
    if layout.positions != "original":
        reason = f"its keys lie at positions {layout.positions!r}, which count the live tokens of a head"
    elif policy.when.over is not None:
        reason = f"it evicts when heads have {policy.when.over} tokens over the budget, which gates never come back to"
    elif policy.rewrite is not None:
        reason = f"{type(policy.rewrite).__name__} rewrites kept slots from those that go, and none goes"
    if reason:
        raise ValueError(f"this policy cannot be relaxed: {reason}; soften one without that")
    soft = Soft(select.select if isinstance(select, Soft) else select, temperature)
    return dataclasses.replace(policy, select=soft, layout=dataclasses.replace(layout, pool=False))


def with_budgets(state: State, budgets: kinds.HeadTable | Annotated[Any, kinds.numbers("B", "L", "K")]) -> State:
    """A state of a relaxed policy that keeps so many tokens of every layer and head, protected ones included.

    `with_table` makes a hard policy of them, from their shares of what protected tokens leave.

    Args:
      state: from `start`, or later.
      budgets: real numbers, for all sequences or for each. Traced ones have gradients. Where one decision is made for
        all layers (`shared_layers`), those of the first layer are all layers'.

    Raises:
      ValueError: a state without a relaxed layer, budgets of other layers or heads than it has, or budgets that are
        infinite or no numbers, where they are known.
    """
    budgets = jnp.asarray(budgets, float)
    shape = len(state.length), len(state.layers), state.plan.infos[0].num_kv_heads
    if len(numbers := sorted({info.num_kv_heads for info in state.plan.infos})) > 1:
        raise ValueError(f"layers of the state have {numbers} heads, for which no table of budgets has a shape")
    if budgets.shape not in (shape, shape[1:]):
        raise ValueError(
            f"budgets have the shape {budgets.shape}, but the state has {shape[0]} sequences, {shape[1]} layers and "
            f"{shape[2]} heads; give one a head of every layer"
        )
    budgets = jnp.broadcast_to(budgets, shape)
    return _changed(state, lambda soft, i: dataclasses.replace(soft, budgets=budgets[:, i]))


def with_temperature(state: State, temperature: float | Float[Array, ""]) -> State:
    """A state of a relaxed policy at another temperature, which may be traced: annealing compiles nothing new.

    Raises:
      ValueError: a state without a relaxed layer, a number that is not positive.
    """
    check_temperature(temperature)
    full = lambda x: jnp.broadcast_to(jnp.asarray(temperature, x.dtype), x.shape)
    return _changed(state, lambda soft, i: dataclasses.replace(soft, temperature=full(soft.temperature)))


def _changed(state: State, change: Callable[[Softness, int], Softness]) -> State:
    """A state whose `Softness` is changed by `change(softness, layer)`."""
    is_soft = lambda x: isinstance(x, Softness)
    if not any(map(is_soft, jax.tree.leaves(state.hparams, is_leaf=is_soft))):
        raise ValueError("no layer of this state is relaxed; start it with soften(policy, temperature)")
    each = enumerate(state.hparams)
    one = lambda i: lambda x: change(x, i) if is_soft(x) else x
    return dataclasses.replace(state, hparams=tuple(jax.tree.map(one(i), x, is_leaf=is_soft) for i, x in each))


def with_table(policy: Evict, shares: kinds.HeadTable) -> Evict:
    """A policy whose heads get these shares of what protected tokens leave of the model's budget.

    Shares are relative to the average, 1. Budgets as `with_budgets` takes them are tokens, protected ones included:
    `left / left.mean()` with `left = budgets - protected` are the shares that divide the same budget so.

    Raises:
      ValueError: shares that are no table of layers and heads, that are negative or whose mean is not 1, or a policy
        whose budget they cannot divide, such as the full cache or a chain.
    """
    shares = np.asarray(shares, np.float64)
    if not (shares >= 0).all():
        raise ValueError(f"shares have the shape {shares.shape}; give a row a layer, one number from 0 on a head")
    if abs(shares.mean() - 1) > 1e-3:
        raise ValueError(
            f"shares have a mean of {shares.mean():.6g}, not 1, the share of the average head beside protected tokens; "
            "divide them by their mean, and take protected tokens off budgets before that"
        )
    layers, heads = tuple(shares.sum(1).tolist()), tuple(map(tuple, shares.tolist()))
    return dataclasses.replace(policy, layers=LayerShares(layers), heads=HeadShares(heads))


def annealed(start: float, end: float, fraction: float | Float[Array, ""]) -> float | Float[Array, ""]:
    """A temperature that falls geometrically from `start` to `end` as `fraction` goes from 0 to 1.

    Raises:
      ValueError: temperatures that are not positive, a fraction outside [0, 1], where it is known.
    """
    check_temperature((start, end))
    if not isinstance(fraction, jax.core.Tracer) and not np.all((fraction >= 0) & (fraction <= 1)):
        raise ValueError(f"fraction={fraction} of the steps; give a number from 0 to 1")
    return start * (end / start) ** fraction


kinds.doors(__name__)
