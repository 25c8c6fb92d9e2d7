"""How many tokens: counts, their division over layers and heads, and when they hold. All counts are made on the host."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.core.contract import MOST, Count, Part, count, data, resolve, value

LONGEST = 2**24  # stands for prompts of any length


@value
class Share:
    """A share of the budget."""

    share: float

    def __call__(self, prompt, budget):
        return np.floor(self.share * budget + 1e-9).astype(np.int64)


@value
class Of:
    """A count for layers of a given budget, wherever it is asked for."""

    count: Count
    budget: Count

    def __call__(self, prompt, budget):
        return resolve(self.count, prompt, resolve(self.budget, prompt))


@value
class Combined:
    """Several counts as one: their `sum`, the `least` of them, or the first `less` the others, not below 0."""

    how: Literal["sum", "least", "less"]
    counts: tuple

    def __call__(self, prompt, budget):
        each = [resolve(n, prompt, budget) for n in self.counts]
        return {"sum": sum(each), "least": np.min(each, 0), "less": np.maximum(2 * each[0] - sum(each), 0)}[self.how]


@value
class Times:
    """A multiple of a count."""

    count: Count
    factor: float

    def __call__(self, prompt, budget):
        return np.minimum(np.floor(resolve(self.count, prompt, budget) * self.factor + 1e-9), MOST).astype(np.int64)


@value
class Above:
    """A count for prompts longer than `shortest`; others are kept whole."""

    count: Count
    shortest: int

    def __call__(self, prompt, budget):
        n = resolve(self.count, prompt, budget)
        return np.where(prompt <= self.shortest, np.maximum(n, prompt), n)


def known(n: Count, ctx):
    """A count as an array "B": by its table where it depends on the prompt."""
    lengths = np.arange(ctx.width + 1)
    table = np.minimum(resolve(n, lengths), MOST).astype(np.int32)
    return jnp.asarray(table)[ctx.prompt_length]


def apportion(shares, limit, xp: Any = np):
    """Whole numbers near `shares` along the last axis: the same total, none above `limit`, largest remainders up."""
    limit = xp.broadcast_to(limit, shares.shape).astype(shares.dtype)
    total = xp.minimum(xp.round(shares.sum(-1, keepdims=True)), limit.sum(-1, keepdims=True))

    def spread(_, shares):
        over, shares = xp.maximum(shares - limit, 0).sum(-1, keepdims=True), xp.minimum(shares, limit)
        weight = xp.where(shares < limit, shares, 0)
        weight = xp.where(weight.sum(-1, keepdims=True) > 0, weight, limit - shares)
        mass = weight.sum(-1, keepdims=True)
        return shares + over * weight / xp.where(mass > 0, mass, 1)

    if xp is np:
        for _ in range(shares.shape[-1]):
            shares = spread(0, shares)
    else:
        shares = lax.fori_loop(0, shares.shape[-1], spread, shares)
    shares = xp.minimum(shares, limit)
    floor = xp.floor(shares)
    left = xp.where(floor < limit, shares - floor, -1)
    rank = xp.argsort(xp.argsort(-left, axis=-1, stable=True), axis=-1, stable=True)
    return (floor + (rank < total - floor.sum(-1, keepdims=True))).astype(np.int32)


# ------------------------------------------------------------------------------------------------ over layers


@value
class Even:
    """Every layer gets the average."""

    def __call__(self, average: np.ndarray, limit: np.ndarray, num_layers: int) -> np.ndarray:
        """Tokens "M L" of every layer, for averages "M" and what exists "M"."""
        return np.repeat(average[:, None], num_layers, 1)


@value
class Pyramid:
    """Budgets that fall linearly from the first layer to the last (PyramidKV)."""

    beta: float = 20.0

    def __call__(self, average, limit, num_layers):
        last = average[:, None] / self.beta
        first = 2 * average[:, None] - last
        place = np.arange(num_layers) / max(num_layers - 1, 1)
        shares = first - (first - last) * place if num_layers > 1 else average[:, None] * 1.0
        return apportion(shares, limit[:, None])


@value
class LayerShares:
    """Fixed shares of the layers, learned or measured."""

    weights: tuple[float, ...]

    def __call__(self, average, limit, num_layers):
        return apportion(average[:, None] * np.asarray(self.weights) * (num_layers / sum(self.weights)), limit[:, None])


# ------------------------------------------------------------------------------------------------ over heads


class Adaptive(Part):
    """Heads compete for the layer's budget: `alpha` of it goes where the best scores are (Ada-KV)."""

    alpha: float = 0.5
    max_ratio: float = float("inf")

    def most(self, average: np.ndarray, limit: np.ndarray, info) -> np.ndarray:
        """The most that one head can get: "M"."""
        all_in_one = _ceil(average * (1 - self.alpha + self.alpha * info.num_kv_heads))
        most = np.minimum(all_in_one, _ceil(average * min(self.max_ratio, info.num_kv_heads)))
        return np.minimum(most, np.maximum(limit, average))

    def __call__(self, score, average, slots):
        """Tokens of every head "B K" for an average "B"."""
        B, K, S = score.shape
        flat = jnp.where(slots.candidates, score, -jnp.inf).reshape(B, K * S)
        rank = jnp.argsort(jnp.argsort(-flat, axis=-1, stable=True), axis=-1)
        own = ((rank < K * average[:, None]) & (flat > -jnp.inf)).reshape(B, K, S).sum(-1).astype(jnp.float32)
        mean = average[:, None].astype(jnp.float32)
        return whole(self.alpha * own + (1 - self.alpha) * mean, slots, mean, min(self.max_ratio, K))


class HeadShares(Part):
    """Fixed shares of the kv heads of every layer, learned or measured."""

    weights: tuple[tuple[float, ...], ...] = data()

    def _ratios(self, layer: int) -> np.ndarray:
        row = np.asarray(self.weights[layer])
        return row * (len(row) / row.sum())

    def most(self, average, limit, info):
        """See `Adaptive`."""
        return np.minimum(_ceil(average * self._ratios(info.layer).max()), np.maximum(limit, average))

    def hparams(self, info, lengths, budget):
        """See `Part`."""
        return jnp.asarray(np.repeat(self._ratios(info.layer)[None], len(lengths), 0), jnp.float32)

    def __call__(self, score, average, slots):
        ratios, mean = slots.hparams, average[:, None].astype(jnp.float32)
        return whole(mean * ratios, slots, mean, ratios.max(-1, keepdims=True))


def _ceil(x):
    return np.ceil(x - 1e-9).astype(np.int64)


def whole(shares, slots, mean, ratio):
    """Whole shares "B K" whose mean is `mean`, none above `ratio` of it or, beyond the mean, above what exists."""
    exist = slots.candidates.sum(-1).astype(jnp.float32)
    shares = jnp.where(exist.mean(-1, keepdims=True) <= mean, exist, shares)
    shares = shares + (mean - shares.mean(-1, keepdims=True))
    return apportion(shares, jnp.minimum(jnp.maximum(exist, mean), jnp.ceil(mean * ratio - 1e-4)), jnp)


# ------------------------------------------------------------------------------------------------ when


@value
class Schedule:
    """When a policy evicts; scores are updated at every step all the same.

    Attributes:
      prefill: after the prompt.
      every: at every so many decode steps; None for never.
      over: whenever a head has grown so far beyond its budget; it loses `drop` tokens at least.
      before: before a step appends its token, so that a cache never exceeds its budget.
    """

    prefill: bool = True
    every: int | None = None
    over: int | None = None
    drop: Count = count(default=0)
    before: bool = False

    @property
    def decodes(self) -> bool:
        """Whether it ever evicts while decoding."""
        return self.every is not None or self.over is not None

    def room(self, new: int) -> int:
        """Slots beyond the budget that a head needs between evictions."""
        return 1 if self.before else min(new, self.every or self.over or new)


STEP = Schedule(every=1)
