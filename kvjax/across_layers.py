"""One budget for all layers, divided when all of them have been read and scored."""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import mesh
from kvjax.cache.context import Context, Phase, Site
from kvjax.cache.state import Chosen, KVState, LayerKV
from kvjax.eviction import Evict, EvictMemory, Numbers
from kvjax.pallas_kernels.values import Value, a, number, settle, tokens
from kvjax.policy import LayerSpec, Policy, Rule, check_moment, context, decides_by_layer, obeying
from kvjax.scoring.row_votes import LastVotes, mean_and_variance
from kvjax.scoring.select import Selection, largest
from kvjax.scoring.stats import AttentionStats, LayerStats, Measurement, Moment, Slots, ordered
from kvjax.sizes.allocation import Adaptive, UniformLayers, apportion
from kvjax.sizes.budget import Times, as_count


@dataclasses.dataclass(frozen=True)
class Competitor:
    """A layer among those that compete for a budget.

    Attributes:
      rule: what evicts in it.
      slots: its slots, with the candidates among them.
      score: their scores; only those of candidates compete.
      numbers: its numbers of tokens, were the budget divided equally.
      outside: of these, what every head gets beside what it competes for.
      most: the most that a head can compete for on average.
      bound: an upper bound of the budgets (static).
    """

    rule: Evict
    slots: Slots
    score: Float[Array, "B K S"]
    numbers: Numbers
    outside: Int[Array, "B"]
    most: Int[Array, "B"]
    bound: int

    @property
    def average(self) -> Int[Array, "B"]:
        """What a head would compete for, were the budget divided equally."""
        return self.numbers.budget - self.outside


class Division(Value, abc.ABC):
    """A frozen dataclass that divides a budget over the layers that have been read."""

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """What it looks at beside scores."""
        del phase
        return ()

    def check(self, rule: Evict) -> None:
        """Raises ValueError for a rule whose layers cannot be compared so."""
        del rule

    @abc.abstractmethod
    def __call__(self, layers: Sequence[Competitor]) -> list[Int[Array, "B K"]]:
        """Tokens of every head of every layer, beside those that it gets anyway."""


@dataclasses.dataclass(frozen=True)
class TopScores(Division):
    """The best scores of the whole model: one top-k over all layers and heads (Layer-DefensiveKV, KVzip).

    Where a layer's best are more than its slots can hold, the best of them that it can hold compete.
    """

    def check(self, rule: Evict) -> None:
        """See `Division`."""
        if not isinstance(rule.heads, Adaptive) or rule.heads != Adaptive(alpha=1.0, max_ratio=float("inf")):
            raise ValueError(
                f"one top-k over layers and heads lets heads compete freely, but the policy has {rule.heads}; use "
                "heads=Adaptive(alpha=1.0, max_ratio=float('inf'))"
            )

    def __call__(self, layers: Sequence[Competitor]) -> list[Int[Array, "B K"]]:
        """See `Division`."""
        B, K = layers[0].score.shape[:2]
        flat = lambda x: x.reshape(B, 1, -1)
        compete, ages = [], []
        for layer in layers:
            score, age = flat(jnp.where(layer.slots.candidates, layer.score, -jnp.inf)), flat(layer.slots.kv.pos)
            within = self._best((score, age), K * layer.most)
            compete.append(jnp.where(within, score, -jnp.inf))
            ages.append(age)
        total = functools.reduce(jnp.add, [K * layer.average for layer in layers])
        chosen = self._best((jnp.concatenate(compete, -1), jnp.concatenate(ages, -1)), total)
        chosen = chosen & (jnp.concatenate(compete, -1) > -jnp.inf)
        ends = np.cumsum([x.shape[-1] for x in compete])[:-1]
        by_layer = jnp.split(chosen, ends, axis=-1)
        return [x.reshape(B, K, -1).sum(-1, dtype=jnp.int32) for x in by_layer]

    def _best(self, keys: tuple[Array, Array], count: Int[Array, "B"]) -> Bool[Array, "B 1 M"]:
        """The `count` largest, of equals the newest, then the one that comes first."""
        index = jnp.broadcast_to(-jnp.arange(keys[0].shape[-1], dtype=jnp.int32), keys[0].shape)
        return largest((*keys, index), jnp.minimum(count, keys[0].shape[-1])[:, None])


class Weighted(Division):
    """Layers get shares in proportion to a weight, then divide them over heads as the policy says."""

    @abc.abstractmethod
    def weight(self, layer: Competitor) -> Float[Array, "B"]:
        """How much of the budget a layer asks for; only ratios matter."""

    def __call__(self, layers: Sequence[Competitor]) -> list[Int[Array, "B K"]]:
        """See `Division`."""
        weights = jnp.stack([self.weight(layer) for layer in layers], axis=-1)
        total = weights.sum(-1, keepdims=True)
        weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 1 / len(layers))
        average = jnp.stack([layer.average for layer in layers], axis=-1)
        exist = jnp.stack([layer.slots.candidates.sum((1, 2), dtype=jnp.int32) for layer in layers], axis=-1)
        exist = -(-exist // layers[0].score.shape[1])
        most = jnp.stack([layer.most for layer in layers], axis=-1)
        shares = weights * average.sum(-1, keepdims=True).astype(jnp.float32)
        limit = jnp.maximum(jnp.minimum(exist, most), average)
        outside = jnp.stack([layer.outside for layer in layers], axis=-1)
        least = ((outside == 0) & (average > 0)).astype(jnp.int32)  # no layer is left without a token
        divided = apportion(shares, limit, jnp, least)
        heads = lambda layer, share: layer.rule.heads.heads(
            layer.score, layer.slots.candidates, share, layer.bound, layer.slots.ctx.site, layer.outside
        )
        return [heads(layer, divided[:, i]) for i, layer in enumerate(layers)]


@dataclasses.dataclass(frozen=True)
class ScoreEntropy(Weighted):
    r"""In proportion to how evenly scores are spread over a layer (LAVa, arXiv 2509.09754, section 4.3).

    $-\sum_j s_j \ln s_j / \ln n$, with $s$ the scores of all $n$ candidates of the layer, over their sum. Scores must
    not be negative.
    """

    def weight(self, layer: Competitor) -> Float[Array, "B"]:
        """See `Weighted`."""
        among = layer.slots.candidates
        score = jnp.where(among, layer.score, 0.0)
        total = score.sum((1, 2), keepdims=True)
        p = score / jnp.where(total > 0, total, 1.0)
        entropy = -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0).sum((1, 2))
        n = jnp.maximum(among.sum((1, 2), dtype=jnp.int32), 2).astype(jnp.float32)
        return entropy / jnp.log(n)


@dataclasses.dataclass(frozen=True)
class Preference(Weighted):
    r"""In proportion to $H^{1/\tau_1} V^{1/\tau_2}$ of the last rows' attention (CAKE, arXiv 2503.12491, Eq. 4 and 5).

    $H$ is the entropy of what the rows give the candidates, summed over rows and query heads; $V$ the variance over the
    rows of what a candidate gets, summed over candidates and query heads.

    Attributes:
      rows: how many of the prompt's last rows.
      entropy, variance: $\tau_1$ and $\tau_2$.
    """

    rows: int = 32
    entropy: float = 1.6
    variance: float = 0.6

    def __post_init__(self):
        positive = number("(0, inf)", "a temperature is positive and finite")
        settle(self, rows=tokens(1, "at least one row must be observed"), entropy=positive, variance=positive)

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Division`."""
        return (LastVotes(self.rows).observed,) if phase == "prefill" else ()

    def weight(self, layer: Competitor) -> Float[Array, "B"]:
        """See `Weighted`."""
        slots = layer.slots
        votes, exists = LastVotes(self.rows).votes(slots.kv, slots.stats, slots.ctx)
        votes = jnp.where(slots.candidates[:, :, None, None], votes, 0.0)
        spread = -jnp.where(votes > 0, votes * jnp.log(votes + 1e-10), 0.0).sum((1, 2, 3, 4))
        shift = mean_and_variance(votes, exists)[1].sum((1, 2, 3))
        # Only ratios matter, and the product of small powers is not smaller than floats reach.
        log = lambda x: jnp.log(jnp.maximum(x, jnp.finfo(jnp.float32).tiny))
        return jnp.exp(log(spread) / self.entropy + log(shift) / self.variance)


@dataclasses.dataclass(frozen=True)
class Competing(Rule):
    """An `Evict` in a layer that competes with others; alone, it has the average budget.

    Attributes:
      evict: what it does with the budget that it gets.
      by: how the budget is divided.
      max_ratio: a layer has slots for this many times the average.
    """

    evict: Evict
    by: Division
    max_ratio: float

    @property
    def _largest(self) -> Evict:
        return dataclasses.replace(self.evict, budget=Times(as_count(self.evict.budget, "budget"), self.max_ratio))

    def competitor(self, memory: EvictMemory, kv: LayerKV, stats: LayerStats, ctx: Context) -> Competitor:
        """The layer among others, with the memory after the prompt's rows."""
        numbers, largest = self.evict.numbers(ctx), self._largest.numbers(ctx)
        slots, score, outside = self.evict.ranked(memory, kv, stats, ctx, numbers)
        return Competitor(self.evict, slots, score, numbers, outside, largest.budget - outside, largest.most)

    def spec(self, site: Site) -> LayerSpec:
        """See `Rule`."""
        own, largest = self.evict.spec(site), self._largest.spec(site)
        prompt = ordered((*own.prompt, *self.by.observe("prefill")))
        return dataclasses.replace(largest, target=own.target, prompt=prompt, first=None)

    def init(self, site: Site, batch: int) -> EvictMemory:
        """See `Rule`."""
        return self.evict.init(site, batch)

    def check(self, site: Site, prompt_length: int) -> None:
        """See `Rule`."""
        self.evict.check(site, prompt_length)
        self.by.check(self.evict)
        if self.evict.when.decodes or not self.evict.when.prefill:
            raise ValueError(
                f"layers compete once, when the prompt has been read, but {self.evict.when} evicts while decoding; use "
                "after_prefill()"
            )
        if not isinstance(self.evict.layers, UniformLayers):
            raise ValueError(
                f"layers compete for one budget, but {self.evict.layers} divides it already; use UniformLayers()"
            )

    def check_scored(self, memory: EvictMemory, site: Site, heads: np.ndarray | None = None) -> None:
        """See `Rule`."""
        self.evict.check_scored(memory, site, heads)

    def reserve(self, kv: LayerKV, ctx: Context) -> Int[Array, "B K"]:
        """See `Rule`."""
        return self.evict.reserve(kv, ctx)

    def visible(self, moment: Moment) -> Bool[Array, "B K S"] | Chosen | None:
        """See `Rule`."""
        return self.evict.visible(moment)

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """See `Rule`: what a layer does that competes with none."""
        return self.evict.decide(kv, stats, ctx)


@dataclasses.dataclass(frozen=True)
class AcrossLayers(Policy):
    """One budget for all layers; made by `across_layers`."""

    shared: ClassVar[bool] = True

    policy: Policy
    by: Division
    max_ratio: float = 2.0

    def __post_init__(self):
        settle(
            self,
            policy=a(Policy),
            by=a(Division),
            max_ratio=number("[1, inf)", "a layer needs slots for the average (1), and static shapes some bound"),
        )

    def rules(self, site: Site) -> "tuple[Competing]":
        """The policy's one rule, which competes."""
        rules = self.policy.rules(site)
        if len(rules) != 1 or not isinstance(rules[0], Evict):
            raise ValueError(
                f"layers compete by the scores of one Evict, but layer {site.layer} has {list(rules)}; give a policy "
                "that is one Evict, as most methods are"
            )
        return (Competing(rules[0], self.by, self.max_ratio),)

    def __call__(self, state: KVState, attn_stats: AttentionStats) -> KVState:
        """Every layer is scored, the budget divided, and every layer evicts down to what it got."""
        check_moment(self, state, attn_stats)
        if attn_stats.phase == "decode":
            return state
        contexts = tuple(context(state, i, "prefill", attn_stats.tokens) for i in range(len(state.layers)))
        contexts = tuple(dataclasses.replace(ctx, sizes=None) for ctx in contexts)  # which are the plan's, if any
        views = tuple(kv.view() for kv in state.layers)
        decided = mesh.everywhere(self._decide, views, attn_stats.layers, contexts)
        kept = zip(state.layers, decided, strict=True)
        return dataclasses.replace(state, layers=tuple(kv.apply(obeying(*each)) for kv, each in kept))

    def _decide(
        self, layers: Sequence[LayerKV], stats: Sequence[LayerStats], contexts: Sequence[Context]
    ) -> list[tuple[tuple[EvictMemory], Selection]]:
        found = []
        for kv, measured, ctx in zip(layers, stats, contexts, strict=True):
            (rule,) = self.rules(ctx.site)
            memory = rule.evict.updated(kv.memory[0], kv, measured, ctx)
            found.append((memory, rule.competitor(memory, kv, measured, ctx)))
        divided = self.by([competitor for _, competitor in found])
        chosen = [
            here.rule.select_prompt(memory, here.slots.kv, here.slots.stats, here.slots.ctx, here.numbers, shares)
            for (memory, here), shares in zip(found, divided, strict=True)
        ]
        stay = (
            (here.rule.compete(here.slots.kv, here.slots.ctx) & selection.keep).any((1, 2))
            for (_, here), selection in zip(found, chosen, strict=True)
        )
        decides = functools.reduce(jnp.logical_or, stay)[:, None]
        return [
            ((here.rule.noted(memory, here.slots.kv, here.slots.ctx, selection, decides),), selection)
            for (memory, here), selection in zip(found, chosen, strict=True)
        ]


def across_layers(policy: Policy, by: Division, *, max_ratio: float = 2.0) -> AcrossLayers:
    """Layers compete for the model's budget, once all of them have been read.

    Released code divides it layer by layer, and evicts from earlier layers again as later ones ask for their share;
    what is kept in the end is the same, since a layer's tokens are ranked once. Here all keys and values of the prompt
    exist until the last layer was read, so peak memory grows with depth. Shapes are static: every layer has slots for
    `max_ratio` times the average, and one that asks for more gets its best tokens up to that, the others the rest.

    Args:
      policy: one `Evict` a layer, with the same budget in all, that evicts after the prompt.
      by: how the budget is divided.
      max_ratio: no layer gets more than this many times the average.

    Raises:
      ValueError: what is no policy or no division, or a policy of `shared_layers`, all of whose layers keep the same
        tokens, or of `across_layers`; in `make_plan`, a policy of several rules, one that evicts while
        decoding, or one that divides its budget over layers already.
    """
    return AcrossLayers(decides_by_layer(policy, "across_layers"), by, max_ratio)
