"""Policies with a temperature: a top-k whose sum is the budget exactly, and gates that attention reads as weights.

A hard policy keeps a slot or not; a relaxed one keeps some of every slot, a gate in [0, 1], so that whatever attention
makes of the cache has a gradient with respect to budgets, to shares of stages, or to scores. As the temperature falls
the gates become the hard policy's mask. At every temperature a head's gates add up to its budget.

    policy = kvjax.soften(methods.snapkv(64), temperature=4.0)
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=R)

    def loss(budgets):  # "L K", real numbers
        state = relax.with_budgets(kvjax.init_state(plan, lengths), budgets)
        _, state, _ = kvjax.forward(model, params, prompt, state, valid=lengths, evict=True)
        logits, _, _ = kvjax.forward(model, params, answer, state, last_only=False)
        return relax.output_kl(full_logits, logits)

    jax.grad(loss)(budgets)
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.algebra import each_rule
from kvjax.analysis.losses import output_kl as output_kl
from kvjax.cache.context import Phase, Site
from kvjax.cache.state import KVState, PerHead
from kvjax.cache.state import with_gates as with_gates
from kvjax.eviction import LARGE, Evict
from kvjax.pallas_kernels.pytree import pytree
from kvjax.pallas_kernels.values import a, as_annotated, as_numbers, as_numpy, checked, each, number, one_of, settle
from kvjax.policy import Policy, Rule
from kvjax.scoring.select import Limits, Select, Selection, Stage, TopK
from kvjax.scoring.stats import Measurement, Slots
from kvjax.sizes.budget import Count

Scale = Literal["rank", "score"]

_FAR = 1e4  # deviations from the mean: a gate is open or closed there at any temperature of use

# --- the soft top-k ---


@as_annotated
def soft_top_k(
    score: Float[Array, "*batch S"],
    budget: float | Float[Array, "*batch"],
    *,
    temperature: float | Float[Array, "..."],
    weight: Float[Array, "*batch S"] | None = None,
) -> Float[Array, "*batch S"]:
    r"""Gates $g_s = \sigma((x_s - \tau) / T)$ with the threshold $\tau$ at which $\sum_s w_s g_s$ is the budget.

    The threshold is found by bisection; a last step along its own derivative takes away what rounding left of the sum,
    which is exact to about 1e-12 of the budget in float64 and 1e-6 in float32. Gradients come from the implicit
    function theorem instead of the iterations: with $d_s = g_s (1 - g_s) / T$, $\partial\tau/\partial x_s = w_s d_s /
    \sum w d$ and $\partial\tau/\partial b = -1 / \sum w d$. So the gradient of a loss with respect to the budget is the
    mean of $\partial \ell/\partial g_s$ over the slots at the threshold, and stays finite as T falls, when it
    is that of the slot that is partly kept, or of the next best where the budget is a whole number.

    Args:
      score: larger = keep; finite where the weight is not zero.
      budget: what the weighted gates add up to. Where it is at least the sum of the weights all gates are 1, where it
        is not positive all are 0, and in both cases its gradient is 0. Where it is not a number, neither are the gates.
      temperature: in units of the score; one number, or one for every row of the batch.
      weight: what a whole slot costs, 1 if None. A slot of weight 0 does not compete, and its gate is 0.

    Raises:
      ValueError: a temperature that is not positive, where it is known.
    """
    _check_positive(temperature)
    weight = jnp.ones_like(score) if weight is None else weight
    whole = lambda x: jnp.broadcast_to(jnp.asarray(x, score.dtype), score.shape[:-1])
    return _compiled(score, whole(as_numbers("budget", budget)), whole(temperature), weight)


def _check_positive(temperature: Any) -> None:
    """Raises ValueError for a number that is no temperature; a traced one cannot be looked at."""
    if isinstance(temperature, jax.core.Tracer):
        return
    known = as_numpy("temperature", temperature)
    real = jnp.issubdtype(known.dtype, jnp.integer) or jnp.issubdtype(known.dtype, jnp.floating)
    if not real or not np.all((known > 0) & np.isfinite(known)):
        raise ValueError(f"temperature={temperature} must be positive and finite; the hard policy is the limit at 0")


@jax.custom_vjp
def _soft_top_k(score, budget, temperature, weight):
    return _solve(score, budget, temperature, weight)[0]


def _solve(score, budget, temperature, weight):
    """The gates, and the scores' distances to the threshold in units of the temperature."""
    competes = weight > 0
    total = weight.sum(-1)
    inside = (budget > 0) & (budget < total)
    b = jnp.where(inside, budget, total / 2)
    x = jnp.where(competes, score, 0.0) / temperature[..., None]
    margin = jnp.log(b) - jnp.log(jnp.where(inside, total - b, b))
    margin = jnp.where(total > 0, margin, 0.0)
    low = jnp.where(competes, x, jnp.inf).min(-1) - margin  # here all gates are at least b / total
    high = jnp.where(competes, x, -jnp.inf).max(-1) - margin  # and here at most
    some = jnp.isfinite(low)
    low, high = jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) / 2
        above = (weight * jax.nn.sigmoid(x - middle[..., None])).sum(-1) > b
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    steps = jnp.finfo(score.dtype).nmant + 12
    low, high = lax.fori_loop(0, steps, halve, (low, high))
    z = x - (low + (high - low) / 2)[..., None]
    gate = jnp.where(competes, jax.nn.sigmoid(z), 0.0)
    for _ in range(2):
        left = _left(b, weight * gate)
        gate = jnp.clip(gate + left[..., None] * _at_threshold(z, weight), 0.0, 1.0)
    outside = jnp.where(budget >= total, 1.0, jnp.where(jnp.isnan(budget), jnp.nan, 0.0))[..., None]
    gate = jnp.where(inside[..., None], gate, jnp.where(competes, outside, 0.0))
    return gate, z


def _left(budget, parts):
    """`budget - parts.sum(-1)`, without the rounding of a long sum.

    Multiples of 2^-10 add up exactly as long as 24 (or 53) bits hold their sum; what is beyond them is tiny.
    """
    coarse = jnp.round(parts * 1024.0) / 1024.0
    return (budget - coarse.sum(-1)) - (parts - coarse).sum(-1)


def _at_threshold(z, weight):
    """How the gates share one more unit of budget: `d / sum(w d)`, which does not underflow far from the threshold."""
    log_d = jax.nn.log_sigmoid(z) + jax.nn.log_sigmoid(-z)
    top = jnp.where(weight > 0, log_d, -jnp.inf).max(-1, keepdims=True)
    d = jnp.where(weight > 0, jnp.exp(log_d - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    mass = (weight * d).sum(-1, keepdims=True)
    return d / jnp.where(mass > 0, mass, 1.0)


def _soft_top_k_fwd(score, budget, temperature, weight):
    gate, z = _solve(score, budget, temperature, weight)
    return gate, (gate, z, budget, temperature, weight)


def _soft_top_k_bwd(residuals, cotangent):
    gate, z, budget, temperature, weight = residuals
    inside = ((budget > 0) & (budget < weight.sum(-1)))[..., None]
    share = jnp.where(inside, _at_threshold(z, weight), 0.0)
    d = jnp.where(inside & (weight > 0), jax.nn.sigmoid(z) * jax.nn.sigmoid(-z), 0.0) / temperature[..., None]
    of_budget = (cotangent * share).sum(-1)
    of_score = d * (cotangent - weight * of_budget[..., None])
    of_temperature = -(of_score * jnp.where(weight > 0, z, 0.0)).sum(-1)
    return of_score, of_budget, of_temperature, -gate * of_budget[..., None]


_soft_top_k.defvjp(_soft_top_k_fwd, _soft_top_k_bwd)
_compiled = jax.jit(_soft_top_k)  # called eagerly, its loop would be compiled at every call


def soft_stages(
    stages: tuple[Stage, ...],
    pos: Int[Array, "*heads S"],
    weight: Float[Array, "*heads S"],
    *,
    temperature: float | Float[Array, "..."],
    scale: Scale = "rank",
) -> Float[Array, "*heads S"]:
    """Passes of soft top-k, each over what the earlier ones left; the gates add up to the sum of the counts.

    A recent window and the best of the rest, NaCl's draw of the rest of the budget, a second stage by another score:
    all of them are such passes, so shares of them have gradients.

    Args:
      stages: scores and counts.
      pos: positions, which decide among equal scores as in `TopK`.
      weight: how much of every slot there is: 0 for dead ones.
      temperature: see `Soft`.
      scale: see `Soft`.
    """
    gate, left = jnp.zeros_like(weight), weight
    for stage in stages:
        score = stage.score.astype(weight.dtype)
        score = mass_rank(score, pos, left) if scale == "rank" else standardised(score, left)
        taken = left * soft_top_k(score, stage.count.astype(weight.dtype), temperature=temperature, weight=left)
        gate, left = gate + taken, left - taken
    return gate


@as_annotated
def mass_rank(
    score: Float[Array, "*heads S"], pos: Int[Array, "*heads S"], weight: Float[Array, "*heads S"]
) -> Float[Array, "*heads S"]:
    """Minus the weight of everything better than a slot and half its own: minus its rank where weights are 1.

    Among equal scores the larger position is better. Slots without weight are behind all others.
    """
    score = jnp.where(weight > 0, score, -jnp.inf)
    by_age = jnp.argsort(-pos, axis=-1, stable=True)
    order = jnp.argsort(-jnp.take_along_axis(lax.stop_gradient(score), by_age, axis=-1), axis=-1, stable=True)
    order = jnp.take_along_axis(by_age, order, axis=-1)
    mass = jnp.take_along_axis(weight, order, axis=-1)
    behind = mass / 2 - jnp.cumsum(mass, axis=-1)
    return jnp.take_along_axis(behind, jnp.argsort(order, axis=-1), axis=-1)


@as_annotated
def standardised(score: Float[Array, "*batch S"], weight: Float[Array, "*batch S"]) -> Float[Array, "*batch S"]:
    """Scores with mean 0 and deviation 1 over the slots that have weight; infinite ones are far beyond the others."""
    infinite = jnp.abs(score) >= LARGE
    counts = ((weight > 0) & ~infinite).astype(score.dtype)
    far = jnp.where(infinite & (weight > 0), jnp.sign(score) * _FAR, 0.0)
    score = jnp.where(counts > 0, score, 0.0)
    total = jnp.maximum(counts.sum(-1, keepdims=True), 1.0)
    centred = (score - score.sum(-1, keepdims=True) / total) * counts
    variance = jnp.square(centred).sum(-1, keepdims=True) / total
    varies = variance > 0
    return centred * jnp.where(varies, lax.rsqrt(jnp.where(varies, variance, 1.0)), 0.0) + far


# --- relaxed policies ---


@pytree
class SoftMemory:
    """What a relaxed policy carries in a layer; both can be traced, so annealing and training compile once.

    Attributes:
      temperature: "B K".
      budgets: real budgets "B K" in place of the policy's own, protected tokens included; None for the policy's own.
    """

    temperature: PerHead
    budgets: PerHead | None = None


@dataclasses.dataclass(frozen=True)
class Soft(Select):
    """Another selection with a temperature: gates instead of a mask. What is gated less than 1 can only lose.

    Protected slots keep what they have; the passes of the selection divide the rest of the budget by `soft_top_k`.

    Attributes:
      select: what is relaxed: `TopK`, `TopKThenRandom`, `TwoStage`.
      temperature: how blurred the boundary between kept and lost is; `with_temperature` replaces it in a state.
      scale: "rank" measures the temperature in tokens, whatever the scores' distribution, and has no gradient with
        respect to scores; "score" in standard deviations of a head's scores.
    """

    select: Select = TopK()
    temperature: float = 1.0
    scale: Scale = "rank"

    def __post_init__(self):
        _check_positive(self.temperature)
        settle(self, select=a(Select), temperature=number("(0, inf)"))
        one_of("Soft.scale", self.scale, "rank", "score")
        if not self.select.staged:
            raise ValueError(f"{self.select} is no sequence of top-k passes, so it cannot be relaxed; use TopK()")
        kind = type(self.select)
        last = lambda name: next(c for c in kind.__mro__ if name in vars(c))
        own = [
            name for name in ("__call__", "best") if hasattr(kind, name) and not issubclass(last("stages"), last(name))
        ]
        if own:
            raise ValueError(
                f"{kind.__name__} selects by a {own[0]} of its own, which gates know nothing of: they follow the "
                f"stages of {last('stages').__name__}; give it stages, too"
            )
        if kind.init is not Select.init:
            raise ValueError(f"{kind.__name__} remembers what init gives, but a relaxed selection has no place for it")

    @property
    def relaxed(self) -> bool:
        """See `Select`."""
        return True

    @property
    def slack(self) -> int:
        """Every slot keeps something, so all that was ever appended stays."""
        return 2**30

    @property
    def counts(self) -> tuple[int | float | Count, ...]:
        """See `Select`."""
        return self.select.counts

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Select`."""
        return self.select.observe(phase)

    def init(self, site: Site, batch: int) -> SoftMemory:
        """See `Select`."""
        return SoftMemory(PerHead(jnp.full((batch, site.num_kv_heads), self.temperature, float)))

    def __call__(self, score, safe, slots, limits):
        """See `Select`."""
        memory: SoftMemory = limits.memory
        given = limits if memory.budgets is None else dataclasses.replace(limits, budgets=memory.budgets.value)
        gates = self.gates(score, safe, slots, given, memory.temperature.value)
        return Selection(slots.kv.live, score, limits.budgets, gates)

    def gates(self, score, safe, slots: Slots, limits: Limits, temperature: Float[Array, "B K"]):
        """The gates "B K S" at a temperature."""
        kv = slots.kv
        have = jnp.ones(kv.pos.shape, temperature.dtype) if kv.gate is None else kv.gate
        have = jnp.where(kv.live, have, 0.0)
        budgets = limits.budgets.astype(have.dtype)
        secure = jnp.where(safe, have, 0.0)
        first = (Stage(kv.pos.astype(have.dtype), jnp.minimum(budgets, secure.sum(-1))),)
        kept = soft_stages(first, kv.pos, secure, temperature=temperature)
        stages = self.select.stages(score, safe, slots, limits)
        counts = [s.count.astype(have.dtype) for s in stages]
        # Slots that came with less than 1 leave more of the budget than the passes were told.
        spare = jnp.maximum(budgets - kept.sum(-1), 0.0) - sum(counts[1:], counts[0])
        counts[0] = jnp.maximum(counts[0] + spare, 0.0)
        stages = tuple(dataclasses.replace(s, count=c) for s, c in zip(stages, counts, strict=True))
        return kept + soft_stages(stages, kv.pos, have - secure, temperature=temperature, scale=self.scale)


def soften(policy: Policy, temperature: float, *, scale: Scale = "rank") -> Policy:
    """The same policy with gates in place of evictions, in every rule.

    Nothing is evicted, so its caches hold every token. While decoding, gates multiply: no slot gets back what it lost.
    Statistics and scores are measured as ever, and gradients do not flow through them.

    Args:
      policy: an `Evict` that keeps positions, or a `chain`, `partition` or `shared_layers` of such.
      temperature: see `Soft`.
      scale: see `Soft`.

    Raises:
      ValueError: a policy that selects in another way than by passes of top-k.
    """
    return each_rule(functools.partial(_softened, temperature=temperature, scale=scale), policy)


def _softened(rule: Rule, *, temperature: float, scale: Scale) -> Rule:
    if not isinstance(rule, Evict):
        raise ValueError(f"{rule} does not keep the best of a score, so it has no temperature; soften an Evict")
    if not rule.select.relaxed:
        relaxed = Soft(rule.select, temperature, scale)
    elif isinstance(rule.select, Soft):
        relaxed = dataclasses.replace(rule.select, temperature=temperature, scale=scale)
    else:
        raise ValueError(f"{rule.select} is relaxed already, and not by a temperature")
    return dataclasses.replace(rule, select=relaxed, storage="dense")


def _map_soft(state: KVState, change: Any) -> KVState:
    """A state whose `SoftMemory`s are changed by `change(memory, layer)`."""
    is_soft = lambda x: isinstance(x, SoftMemory)

    def layer(i, kv):
        found = [x for x in jax.tree.leaves(kv.memory, is_leaf=is_soft) if is_soft(x)]
        if not found:
            return kv
        memory = jax.tree.map(lambda x: change(x, i) if is_soft(x) else x, kv.memory, is_leaf=is_soft)
        return dataclasses.replace(kv, memory=memory)

    if not any(kv.gate is not None for kv in state.layers):
        raise ValueError("no layer of this state is relaxed; make its plan with kvjax.soften(policy, temperature)")
    return dataclasses.replace(state, layers=tuple(layer(i, kv) for i, kv in enumerate(state.layers)))


@as_annotated
def with_budgets(state: KVState, budgets: Float[Array, "*B L K"] | Sequence[Sequence[float]]) -> KVState:
    """A state of a relaxed policy that keeps so many tokens of every layer and head, protected ones included.

    `kvjax.learning.families.with_table` makes a hard policy of them, from shares of what protected tokens leave.

    Args:
      state: from `kvjax.init_state`, or later.
      budgets: real numbers, for all sequences or for each. Traced ones have gradients. Where one decision is made for
        all layers (`kvjax.shared_layers`), those of the first layer are all layers'.

    Raises:
      ValueError: a state without a relaxed layer, budgets of other layers or heads than it has, or budgets that are
        infinite or no numbers, where they are known.
    """
    budgets = jnp.asarray(as_numbers("budgets", budgets))
    heads = {kv.pos.shape[1] for kv in state.layers if kv.gate is not None}
    wrong = budgets.ndim not in (2, 3) or budgets.shape[-2] != len(state.layers)
    wrong = wrong or (heads and budgets.shape[-1] not in heads)
    if wrong or (budgets.ndim == 3 and budgets.shape[0] != state.length.shape[0]):
        raise ValueError(
            f"budgets have the shape {budgets.shape}, but the state has {state.length.shape[0]} sequences, "
            f"{len(state.layers)} layers and {sorted(heads)} heads; give one a head of every layer"
        )
    if not isinstance(budgets, jax.core.Tracer) and not np.isfinite(np.asarray(budgets)).all():
        raise ValueError(f"budgets={budgets}: must be finite numbers of tokens")
    shape = state.length.shape[0], len(state.layers), budgets.shape[-1]
    budgets = jnp.broadcast_to(budgets if budgets.ndim == 3 else budgets[None], shape)
    return _map_soft(state, lambda memory, i: dataclasses.replace(memory, budgets=PerHead(budgets[:, i])))


@as_annotated
def with_temperature(state: KVState, temperature: float | Float[Array, ""]) -> KVState:
    """A state of a relaxed policy at another temperature, which may be traced: annealing compiles nothing new.

    Raises:
      ValueError: a state without a relaxed layer, a number that is not positive.
    """
    _check_positive(temperature)

    def change(memory: SoftMemory, i: int) -> SoftMemory:
        del i
        like = memory.temperature.value
        return dataclasses.replace(
            memory, temperature=PerHead(jnp.broadcast_to(jnp.asarray(temperature, like.dtype), like.shape))
        )

    return _map_soft(state, change)


def annealed(start: float, end: float, fraction: float | Float[Array, ""]) -> Any:
    """A temperature that falls geometrically from `start` to `end` as `fraction` goes from 0 to 1.

    Raises:
      ValueError: temperatures that are not positive, a fraction outside [0, 1], where it is known.
    """
    start, end = (checked(number("(0, inf)"), name, x) for name, x in (("start", start), ("end", end)))
    inside = number("[0, 1]")
    if not isinstance(fraction, jax.Array | np.ndarray):
        fraction = checked(inside, "fraction", fraction)
    elif not isinstance(fraction, jax.core.Tracer):
        checked(each(inside), "fraction", as_numpy("fraction", fraction).ravel())
    return start * (end / start) ** fraction


# --- objectives at the model's output ---


@as_annotated
def task_loss(
    logits: Float[Array, "*batch V"], targets: Int[Array, "*batch"] | Sequence[int]
) -> Float[Array, "*batch"]:
    """Cross-entropy of the right next tokens, in nats; NaN where a traced target is outside the vocabulary.

    Raises:
      ValueError: targets outside the vocabulary, negative ones among them, where they are known.
    """
    vocab = logits.shape[-1]
    if not isinstance(targets, jax.core.Tracer):
        known = as_numpy("targets", targets)
        if known.dtype.kind not in "iu":
            raise ValueError(f"targets are {known.dtype}; give token ids, whole numbers")
        if known.size and (known.min() < 0 or known.max() >= vocab):
            raise ValueError(
                f"targets lie between {known.min()} and {known.max()}, but in a vocabulary of {vocab} ids are from 0 "
                f"to {vocab - 1}; leave out the rows that have no target"
            )
    # A bad id must not count from the end of the vocabulary.
    targets = jnp.asarray(targets, jnp.int32)
    index = jnp.where(targets < 0, vocab, targets)[..., None]
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), index, axis=-1, mode="fill", fill_value=jnp.nan)
    return -found[..., 0]
