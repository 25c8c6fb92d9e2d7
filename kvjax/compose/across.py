"""What is decided for all layers, when all of them have been read: one decision, or the division of one budget."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets import Times, apportion
from kvjax.compose.around import Around, having
from kvjax.compose.evict import Evict, apply_decision
from kvjax.compose.policies import refuse_joint
from kvjax.contract import (
    MOST,
    Context,
    Heads,
    LayerInfo,
    LayerView,
    Observation,
    Phase,
    Policy,
    Ratio,
    Score,
    Size,
    Sizes,
    Slots,
    Stats,
    compiled,
    unique,
    value,
)
from kvjax.observe import by_row, votes
from kvjax.pallas_kernels.kinds import Kind, Range
from kvjax.pallas_kernels.pytree import pytree
from kvjax.scores.rows import mean_and_variance


@pytree
class Competitor:
    """A layer among those that compete for one budget.

    Attributes:
      slots: its slots.
      score: their scores.
      average: tokens of a head on average, those that always stay left out.
      most: the most of these that a head may get.
      least: the fewest that it must get, on average over heads.
    """

    slots: Slots
    score: Float[Array, "B K S"]
    average: Int[Array, "B"]
    most: Int[Array, "B"]
    least: Int[Array, "B"]


@value
class ScoreEntropy:
    """A layer gets the more, the more evenly its scores are spread: their entropy (LAVa)."""

    def observe(self) -> tuple[Observation, ...]:
        """Nothing but what the score observes."""
        return ()

    def __call__(self, layer: Competitor) -> Float[Array, "B"]:
        """The entropy of the layer's scores, 1 for equal ones."""
        among = layer.slots.candidates
        score = jnp.where(among, layer.score, 0.0)
        total = score.sum((1, 2), keepdims=True)
        p = score / jnp.where(total > 0, total, 1.0)
        entropy = -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0).sum((1, 2))
        return entropy / jnp.log(jnp.maximum(among.sum((1, 2)), 2).astype(jnp.float32))


Temperature = Annotated[float, Range(0.2)]  # a smaller one's weights overflow


@value
class Preference:
    """A layer gets the more, the more its last rows' attention is spread and changes from row to row (CAKE).

    The weight is `entropy ** (1 / self.entropy) * variance ** (1 / self.variance)`.

    Attributes:
      rows: how many of the prompt's last rows.
      entropy, variance: the temperatures of both factors.
    """

    rows: Size = 32
    entropy: Temperature = 1.6
    variance: Temperature = 0.6

    def observe(self) -> tuple[Observation, ...]:
        """The attention of the last rows, row by row."""
        return (votes(self.rows),)

    def __call__(self, layer: Competitor) -> Float[Array, "B"]:
        """The layer's weight."""
        rows, exist = by_row(votes(self.rows), layer.slots)
        rows = jnp.where(layer.slots.candidates[:, :, None, None], rows, 0.0)
        spread = -jnp.where(rows > 0, rows * jnp.log(rows + 1e-10), 0.0).sum((1, 2, 3, 4))
        shift = mean_and_variance(rows, exist)[1].sum((1, 2, 3))
        log = lambda x: jnp.log(jnp.maximum(x, jnp.finfo(jnp.float32).tiny))
        return jnp.exp(log(spread) / self.entropy + log(shift) / self.variance)


def by_weight(
    weight: Callable[[Competitor], Float[Array, "B"]], heads: Heads | None, layers: Sequence[Competitor]
) -> list[Int[Array, "B _"]]:
    """The tokens that every head of every layer gets, where layers share in proportion to a weight.

    Args:
      weight: of a layer, such as `ScoreEntropy()`.
      heads: how a layer divides its share over heads; None for equal parts.
      layers: all layers.
    """
    weights = jnp.stack([weight(layer) for layer in layers], -1)
    total = weights.sum(-1, keepdims=True)
    weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 1 / len(layers))
    average = jnp.stack([layer.average for layer in layers], -1)
    K = layers[0].score.shape[1]
    exist = -(-jnp.stack([layer.slots.candidates.sum((1, 2)) for layer in layers], -1) // K)
    limit = jnp.maximum(jnp.minimum(exist, jnp.stack([layer.most for layer in layers], -1)), average)
    least = jnp.stack([layer.least for layer in layers], -1)
    divided = apportion(weights * average.sum(-1, keepdims=True).astype(jnp.float32), limit, jnp, least=least)
    share = lambda layer, n: n[:, None] if heads is None else heads(layer.score, n, layer.slots.of("heads"))
    return [share(layer, divided[:, i]) for i, layer in enumerate(layers)]


def by_top_scores(layers: Sequence[Competitor]) -> list[Int[Array, "B K"]]:
    """The tokens that every head of every layer gets by one top-k of the scores of all layers and heads."""
    B, K = layers[0].score.shape[:2]
    flat, sizes, ages = [], [], []
    for layer in layers:
        score = jnp.where(layer.slots.candidates, layer.score, -jnp.inf).reshape(B, -1)
        age = layer.slots.kv.pos.reshape(B, -1)
        inside = _first(score, age, K * layer.most)
        flat, ages, sizes = [*flat, jnp.where(inside, score, -jnp.inf)], [*ages, age], [*sizes, score.shape[1]]
    every = jnp.concatenate(flat, -1)
    total = K * jnp.stack([layer.average for layer in layers]).sum(0)
    chosen = _first(every, jnp.concatenate(ages, -1), total) & (every > -jnp.inf)
    return [x.reshape(B, K, -1).sum(-1) for x in jnp.split(chosen, np.cumsum(sizes)[:-1], -1)]


def by_composites(layers: Sequence[Competitor]) -> list[Int[Array, "B 1"]]:
    """The tokens that the heads of every layer get by one top-k of composite tokens (KVCompose, arXiv 2509.05165).

    The n-th composite token of a layer is the n-th best of each of its kv heads, and scores their mean; the first layer
    has the best n-th score of all layers, so that none gets more.
    """
    ranks = max(layer.score.shape[2] for layer in layers)
    scores = []
    for layer in layers:
        score = jnp.where(layer.slots.candidates, layer.score, -jnp.inf)
        mean = -jnp.sort(-score, -1).mean(1)
        scores.append(jnp.pad(mean, ((0, 0), (0, ranks - mean.shape[1])), constant_values=-jnp.inf))
    exist = jnp.stack(scores, 1) > -jnp.inf  # where all heads have so many
    each = jnp.stack([functools.reduce(jnp.maximum, scores), *scores[1:]], 1)
    rank, of = jnp.arange(ranks)[None, None], lambda name: jnp.stack([getattr(x, name) for x in layers], 1)[..., None]
    each = jnp.where(exist & (rank < of("most")), jnp.where(rank < of("least"), jnp.inf, each), -jnp.inf)
    flat = each.reshape(len(each), -1)
    chosen = _first(flat, jnp.zeros_like(flat, jnp.int32), of("average").sum((1, 2))) & (flat > -jnp.inf)
    return list(jnp.moveaxis(chosen.reshape(each.shape).sum(-1)[..., None], 1, 0))


_DIVISIONS = by_top_scores, by_composites


def _first(score: Float[Array, "B X"], age: Int[Array, "B X"], n: Int[Array, "B"]) -> Bool[Array, "B X"]:
    """The `n` largest of a row, of equals the newest, then the one that comes first."""
    index = jnp.broadcast_to(-jnp.arange(score.shape[1]), score.shape)
    rank = jnp.argsort(jnp.lexsort((-index, -age, -score), axis=-1), axis=-1)
    return rank < n[:, None]


_weighs = lambda x: callable(x) and not isinstance(x, type) and (hasattr(x, "observe") or x in _DIVISIONS)
Weigher = Annotated[
    Any, Kind("a weight of a layer, such as ScoreEntropy(), or by_top_scores or by_composites", _weighs)
]


class _Joint(Around):
    """A policy that decides for all layers at once, as another one does."""

    joint = True


class _Known(Score):
    """Scores that are known when they are asked for.

    Attributes:
      found: gives them.
    """

    found: Callable[[], Array]

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return self.found()


class SharedLayers(_Joint):
    """One decision for all layers: the first layer decides.

    Attributes:
      policy: how it decides.
      by: what it decides by: the sum of the layers' "statistics", or of an `Evict` the "mean" or the "max" of their
        scores.
    """

    by: Literal["statistics", "mean", "max"] = "statistics"

    def __post_init__(self):
        refuse_joint((self.policy,), "shared layers")
        if self.by != "statistics" and (not isinstance(self.policy, Evict) or self.policy.heads is not None):
            raise ValueError(
                f'by="{self.by}" joins the scores of heads of equal budgets, but the policy is '
                f"{type(self.policy).__name__} with heads={getattr(self.policy, 'heads', None)!r}; give an Evict with "
                "heads=None"
            )
        if wrong := [p.when for p in having(self.policy, "when") if p.when.before]:
            raise ValueError(f"one decision follows a step, but {wrong[0]} decides before it")
        if own := sorted({*self.policy.writes} - {"log_weight"}):
            raise ValueError(
                f"one decision is applied by all layers, but the {own[0]} of slots is each layer's own; the policy "
                "can only evict and weigh"
            )

    def at(self, layer: int, num_layers: int) -> Policy:
        """The same policy in all layers.

        Raises:
          ValueError: a policy inside is another one in some layers.
        """
        if self.policy.at(layer, num_layers) != self.policy:
            raise ValueError(
                "one decision is made for all layers, but a partition gives layers policies of their own; give one "
                "policy for all of them"
            )
        return self

    def sizes(self, info: LayerInfo, lengths: Int[np.ndarray, "M"]) -> Sizes:
        """The sizes of the shared policy.

        Raises:
          ValueError: sizes or data that differ between layers.
        """
        with jax.ensure_compile_time_eval():
            first, own = (self.policy.sizes(dataclasses.replace(info, layer=i), lengths) for i in (0, info.layer))
            same = jax.tree.map(np.array_equal, vars(first), vars(own))
        if not all(jax.tree.leaves(same)):
            raise ValueError(
                "one decision is made for all layers, but budgets or tables of layers 0 and "
                f"{info.layer} differ: {first.per_head.max()} and {own.per_head.max()} slots a head; give all the same"
            )
        return own

    def update_layers(
        self, layers: tuple[LayerView, ...], stats: tuple[Stats, ...], ctxs: tuple[Context, ...]
    ) -> tuple[LayerView, ...]:
        """All layers after the first one has decided by what they share."""
        policy, same = self.policy, ("pos", "fault", "channels", *self.writes)
        if isinstance(policy, Evict) and self.by != "statistics":
            if ctxs[0].phase == "decode" and not policy.when.decodes:
                return layers
            kept, rank = tuple(map(policy.update_memory, layers, stats, ctxs)), policy.ranked

            def shared() -> Float[Array, "B K S"]:
                each = [rank(*x)[1:] for x in zip(kept, stats, ctxs, strict=True)]
                scores, unscored = map(jnp.stack, zip(*each, strict=True))
                score = scores.max(0) if self.by == "max" else (scores / len(kept)).sum(0)
                return jnp.where(unscored.any(0)[..., None], jnp.nan, score)

            first = compiled(policy, score=_Known(shared)).update(layers[0], stats[0], ctxs[0])
        else:
            kept, same = layers, (*same, "memory")
            own = policy.observe(ctxs[0].phase)
            total = Stats((o, jax.tree.map(lambda *x: sum(x), *(seen[o] for seen in stats))) for o in own)
            first = policy.update(layers[0], total, ctxs[0])
        return tuple(kv.replace(**{name: getattr(first, name) for name in same}) for kv in kept)


class AcrossLayers(_Joint):
    """An `Evict` whose layers compete for the model's budget.

    Attributes:
      policy: what is kept.
      by: how layers compete: a weight of a layer, `by_top_scores` or `by_composites`.
      max_ratio: no layer gets more than so many times the average.
    """

    policy: Evict
    by: Weigher
    max_ratio: Ratio = 2.0

    enter, reads, update = Policy.enter, Policy.reads, Policy.update  # those of one layer, by data of its own

    def __post_init__(self):
        if self.policy.when.decodes or not self.policy.when.prefill:
            raise ValueError("layers compete once, after the prompt: give an Evict that does not evict while decoding")

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        """Observations of the policy, and those that weights of layers are computed from."""
        more = self.by.observe() if phase == "prefill" and self.by not in _DIVISIONS else ()
        return unique((*self.policy.observe(phase), *more))

    def sizes(self, info: LayerInfo, lengths: Int[np.ndarray, "M"]) -> Sizes:
        """Room for `max_ratio` times the average budget, in every layer, and for prompts that are kept whole."""
        most = dataclasses.replace(self.policy, budget=Times(self.policy.budget, self.max_ratio))
        own, largest = self.policy.sizes(info, lengths), most.sizes(info, lengths)
        per_head, total = np.maximum(own.per_head, largest.per_head), np.maximum(own.total, largest.total)
        least = jnp.asarray(np.minimum(self.policy.least(info, lengths), MOST), jnp.int32)
        return Sizes(per_head, total, (own.hparams, largest.hparams, least))

    def reserve(self, kv: LayerView, ctx: Context) -> Int[Array, "B K"]:
        return self.policy.reserve(kv, self._own(ctx))

    def update_layers(
        self, layers: tuple[LayerView, ...], stats: tuple[Stats, ...], ctxs: tuple[Context, ...]
    ) -> tuple[LayerView, ...]:
        """All layers after they were scored, the budget was divided, and each kept what it got."""
        if ctxs[0].phase == "decode":
            return layers
        evict, found, mine = self.policy, [], [*map(self._own, ctxs)]
        layers = tuple(map(evict.update_memory, layers, stats, mine))
        for kv, s, ctx, here in zip(layers, stats, ctxs, mine, strict=True):
            (slots, score, _), outside = evict.ranked(kv, s, here), evict.outside(here)
            own, largest, least = ctx.hparams
            average, most = own.budget - outside, jnp.maximum(own.budget, largest.budget) - outside
            least = jnp.maximum(least - outside, (outside == 0).astype(jnp.int32))  # no layer is left without a token
            found.append(Competitor(slots, score, average, most, jnp.minimum(least, average)))
        divided = self.by(found) if self.by in _DIVISIONS else by_weight(self.by, evict.heads, found)
        decisions = [x[0] for x in map(evict.choose, layers, stats, mine, divided)]
        return tuple(map(apply_decision, layers, decisions))

    def _own(self, ctx: Context) -> Context:
        return dataclasses.replace(ctx, hparams=ctx.hparams[0])


def shared_layers(policy: Policy, by: Literal["statistics", "mean", "max"] = "statistics") -> Policy:
    """The same tokens in all layers: one decision is made by what all of them share, and applied by each.

    Args:
      policy: how it is made.
      by: what it is made by: the sum of the layers' "statistics", or of an `Evict` the "mean" or the "max" of their
        scores.

    Raises:
      ValueError: a policy that decides before a step, that changes what slots hold, or that is joint itself; scores to
        share of what is no `Evict`, or of heads with budgets of their own.
    """
    return SharedLayers(policy, by)


def across_layers(policy: Evict, by: Weigher, *, max_ratio: Ratio = 2.0) -> Policy:
    """The same policy, whose layers compete for the model's budget when all of them have read the prompt.

    Args:
      policy: an `Evict` that evicts after the prompt, and not while decoding.
      by: `ScoreEntropy()`, `Preference()` or another weight of a layer; or `by_top_scores` or `by_composites`, one
        top-k over all layers.
      max_ratio: no layer gets more than so many times the average.

    Raises:
      ValueError: a policy that evicts while decoding, or is none of `Evict`.
    """
    return AcrossLayers(policy, by, max_ratio)
