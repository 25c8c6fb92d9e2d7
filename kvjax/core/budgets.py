"""How many tokens: counts, how a budget is divided over layers and heads, and when policies evict.

Counts and layers are resolved on the host; heads are divided in traced code, by their scores.
"""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.core.contract import (
    MOST,
    Context,
    Count,
    Heads,
    LayerInfo,
    Prompts,
    Slots,
    count,
    data,
    resolve,
    value,
)

LONGEST = 2**24  # tokens; a prompt of this length stands for prompts of any length

# ------------------------------------------------------------------------------------------------- counts


@value
class Share:
    """A share of the layer's budget.

    Attributes:
      share: in [0, 1].
    """

    share: float

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise ValueError(f"a share of the budget lies between 0 and 1, not at {self.share}")

    def __call__(self, prompt: Prompts, budget: Prompts | None) -> Prompts:
        if budget is None:
            raise ValueError(f"a budget cannot be Share({self.share}) of itself; give a number of tokens or a float")
        return np.floor(self.share * budget + 1e-9).astype(np.int64)


@value
class Of:
    """A count as it is in layers of one given budget, whatever the layer's own budget is.

    Attributes:
      count: the count.
      budget: the budget that it is resolved for.
    """

    count: Count
    budget: Count

    def __call__(self, prompt: Prompts, budget: Prompts | None) -> Prompts:
        return resolve(self.count, prompt, resolve(self.budget, prompt))


@value
class Combined:
    """Several counts as one.

    Attributes:
      how: their "sum", the "least" of them, or the first one "less" the others, but at least 0.
      counts: the counts.
    """

    how: Literal["sum", "least", "less"]
    counts: tuple[Count, ...]

    def __call__(self, prompt: Prompts, budget: Prompts | None) -> Prompts:
        each = np.stack([resolve(n, prompt, budget) for n in self.counts])
        if self.how == "sum":
            return each.sum(0)
        return each.min(0) if self.how == "least" else np.maximum(each[0] - each[1:].sum(0), 0)


@value
class Times:
    """A multiple of a count.

    Attributes:
      count: the count.
      factor: what it is multiplied by.
    """

    count: Count
    factor: float

    def __call__(self, prompt: Prompts, budget: Prompts | None) -> Prompts:
        return np.minimum(np.floor(resolve(self.count, prompt, budget) * self.factor + 1e-9), MOST).astype(np.int64)


@value
class Above:
    """A count for long prompts; short ones are kept whole.

    Attributes:
      count: the count.
      shortest: prompts of this many tokens or fewer are kept whole.
    """

    count: Count
    shortest: int

    def __call__(self, prompt: Prompts, budget: Prompts | None) -> Prompts:
        n = resolve(self.count, prompt, budget)
        return np.where(prompt <= self.shortest, np.maximum(n, prompt), n)


def known(n: Count, ctx: Context) -> Int[Array, "B"]:
    """A count in tokens for the sequences of a traced call, looked up by the lengths of their prompts."""
    lengths = np.arange(ctx.width + 1)
    table = np.minimum(resolve(n, lengths), MOST).astype(np.int32)
    return jnp.asarray(table)[ctx.prompt_length]


def apportion(shares: Any, limit: Any, xp: Any = np) -> Any:
    """Whole numbers near real shares, with the same total.

    What lies beyond a limit is spread over the others in proportion; then the largest remainders are rounded up.

    Args:
      shares: real numbers "*n L", divided along the last axis.
      limit: the most that each can get, of a shape that broadcasts to theirs. The total is cut to that of the limits.
      xp: `numpy` on the host, `jax.numpy` in traced code.

    Returns:
      int32 "*n L".
    """
    limit = xp.broadcast_to(limit, shares.shape).astype(shares.dtype)
    total = xp.minimum(xp.round(shares.sum(-1, keepdims=True)), limit.sum(-1, keepdims=True))

    def spread(_: Any, shares: Any) -> Any:
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


# ------------------------------------------------------------------------------------------------- over layers


@value
class Even:
    """Every layer gets the average."""

    def __call__(self, average: Prompts, limit: Prompts, num_layers: int) -> Int[np.ndarray, "M L"]:
        """Tokens of each layer.

        Args:
          average: tokens of a layer on average.
          limit: tokens that there are to keep.
          num_layers: layers of the model.
        """
        return np.repeat(average[:, None], num_layers, 1)


@value
class Pyramid:
    """Budgets that fall linearly from the first layer to the last (PyramidKV, arXiv 2406.02069, section 3.2).

    Attributes:
      beta: the last layer gets 1 / beta of the average; 1 for equal budgets.
    """

    beta: float = 20.0

    def __post_init__(self):
        if self.beta < 1:
            raise ValueError(f"beta={self.beta}: the last layer gets 1 / beta of the average, so give 1 or more")

    def __call__(self, average: Prompts, limit: Prompts, num_layers: int) -> Int[np.ndarray, "M L"]:
        last = average[:, None] / self.beta
        first = 2 * average[:, None] - last
        place = np.arange(num_layers) / max(num_layers - 1, 1)
        shares = first - (first - last) * place if num_layers > 1 else average[:, None] * 1.0
        return apportion(shares, limit[:, None])


@value
class LayerShares:
    """Fixed shares of the layers, learned or measured.

    Attributes:
      weights: one a layer; a layer's share is its weight over their sum.
    """

    weights: tuple[float, ...]

    def __call__(self, average: Prompts, limit: Prompts, num_layers: int) -> Int[np.ndarray, "M L"]:
        if len(self.weights) != num_layers:
            raise ValueError(f"LayerShares has {len(self.weights)} weights for {num_layers} layers; give one a layer")
        return apportion(average[:, None] * np.asarray(self.weights) * (num_layers / sum(self.weights)), limit[:, None])


# ------------------------------------------------------------------------------------------------- over heads


class Adaptive(Heads):
    """Heads compete for the layer's budget by their scores (Ada-KV, arXiv 2407.11550, Algorithm 1).

    Attributes:
      alpha: the share of the budget that is competed for; each head gets its part of the rest.
      max_ratio: no head gets more than this many times the average.
    """

    alpha: float = 0.5
    max_ratio: float = float("inf")

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha} is a share of the budget; give a number between 0 and 1")
        if not self.max_ratio >= 1:
            raise ValueError(f"max_ratio={self.max_ratio}: heads cannot all get less than the average; give 1 or more")

    def most(self, average: Prompts, limit: Prompts, info: LayerInfo) -> Prompts:
        all_in_one = _ceil(average * (1 - self.alpha + self.alpha * info.num_kv_heads))
        most = np.minimum(all_in_one, _ceil(average * min(self.max_ratio, info.num_kv_heads)))
        return np.minimum(most, np.maximum(limit, average))

    def __call__(self, score: Float[Array, "B K S"], average: Int[Array, "B"], slots: Slots) -> Int[Array, "B K"]:
        B, K, S = score.shape
        flat = jnp.where(slots.candidates, score, -jnp.inf).reshape(B, K * S)
        rank = jnp.argsort(jnp.argsort(-flat, axis=-1, stable=True), axis=-1)
        own = ((rank < K * average[:, None]) & (flat > -jnp.inf)).reshape(B, K, S).sum(-1).astype(jnp.float32)
        mean = average[:, None].astype(jnp.float32)
        return whole(self.alpha * own + (1 - self.alpha) * mean, slots, mean, min(self.max_ratio, K))


class HeadShares(Heads):
    """Fixed shares of the kv heads, learned or measured.

    Attributes:
      weights: a row a layer with one weight a head; a head's share is its weight over the row's sum.
    """

    weights: tuple[tuple[float, ...], ...] = data()

    def _ratios(self, info: LayerInfo) -> Float[np.ndarray, "K"]:
        """What each head gets, in units of the average."""
        if len(self.weights) != info.num_layers or len(self.weights[info.layer]) != info.num_kv_heads:
            raise ValueError(
                f"HeadShares has {len(self.weights)} rows of {len(self.weights[0])} weights, but the model has "
                f"{info.num_layers} layers of {info.num_kv_heads} kv heads; give a row a layer with one weight a head"
            )
        row = np.asarray(self.weights[info.layer])
        return row * (len(row) / row.sum())

    def most(self, average: Prompts, limit: Prompts, info: LayerInfo) -> Prompts:
        return np.minimum(_ceil(average * self._ratios(info).max()), np.maximum(limit, average))

    def hparams(self, info: LayerInfo, lengths: Prompts, budget: Prompts) -> Float[Array, "M K"]:
        return jnp.asarray(np.repeat(self._ratios(info)[None], len(lengths), 0), jnp.float32)

    def __call__(self, score: Float[Array, "B K S"], average: Int[Array, "B"], slots: Slots) -> Int[Array, "B K"]:
        ratios, mean = slots.hparams, average[:, None].astype(jnp.float32)
        return whole(mean * ratios, slots, mean, ratios.max(-1, keepdims=True))


def _ceil(x: np.ndarray) -> Prompts:
    return np.ceil(x - 1e-9).astype(np.int64)


def whole(
    shares: Float[Array, "B K"], slots: Slots, mean: Float[Array, "B 1"], ratio: int | float | Float[Array, "B 1"]
) -> Int[Array, "B K"]:
    """Shares of heads in whole tokens, whose mean is `mean`.

    Args:
      shares: what heads should get.
      slots: where `candidates` says how many tokens each head can keep.
      mean: tokens of a head on average.
      ratio: no head gets more than this many times the mean, nor more than it can keep if that is beyond the mean.
    """
    exist = slots.candidates.sum(-1).astype(jnp.float32)
    shares = jnp.where(exist.mean(-1, keepdims=True) <= mean, exist, shares)
    shares = shares + (mean - shares.mean(-1, keepdims=True))
    return apportion(shares, jnp.minimum(jnp.maximum(exist, mean), jnp.ceil(mean * ratio - 1e-4)), jnp)


# ------------------------------------------------------------------------------------------------- when


@value
class Schedule:
    """When a policy evicts. Memory is updated at every step all the same.

    Attributes:
      prefill: whether it evicts after the prompt.
      every: evict at every `every`-th decode step; None for never.
      over: evict from a head that has its budget and `over` tokens more; None for never.
      drop: with `over`, the fewest tokens that such a head loses, if so many are not protected.
      before: with `every=1`, evict before a step stores its token, so that a cache never exceeds its budget
        (StreamingLLM). Only for scores that observe nothing.
    """

    prefill: bool = True
    every: int | None = None
    over: int | None = None
    drop: Count = count(default=0)
    before: bool = False

    def __post_init__(self):
        if self.every is not None and self.over is not None:
            raise ValueError(f"Schedule(every={self.every}, over={self.over}): give one of them, not both")
        for name in ("every", "over"):
            if (n := getattr(self, name)) is not None and n < 1:
                raise ValueError(f"Schedule({name}={n}): give at least 1, or None for never")
        if self.before and self.every != 1:
            raise ValueError(f"Schedule(before=True, every={self.every}) evicts before every step; give every=1")

    @property
    def decodes(self) -> bool:
        """Whether it evicts while decoding."""
        return self.every is not None or self.over is not None

    def room(self, max_new_tokens: int) -> int:
        """Slots that a head needs beyond its budget, for `max_new_tokens` decode steps."""
        return 1 if self.before else min(max_new_tokens, self.every or self.over or max_new_tokens)


STEP = Schedule(every=1)
