"""How many tokens: counts, how a budget is divided over layers and heads, and when policies evict.

Counts and layers are resolved on the host; heads are divided in traced code, by their scores.
"""

from types import ModuleType
from typing import Annotated, Any, Literal, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.contract import (
    MOST,
    Amount,
    AtLeastOne,
    Context,
    Count,
    Heads,
    LayerInfo,
    NonNegative,
    Prompts,
    Proportion,
    Ratio,
    Size,
    Slots,
    count,
    data,
    resolve,
    value,
)
from kvjax.pallas_kernels import kinds
from kvjax.pallas_kernels.kinds import numbers

X = TypeVar("X", Array, np.ndarray)
LONGEST = 2**24  # tokens; a prompt of this length stands for prompts of any length

# ------------------------------------------------------------------------------------------------- counts


@value
class Share:
    """A share of the layer's budget.

    Attributes:
      share: in [0, 1].
    """

    share: Proportion

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
    factor: NonNegative

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
    shortest: Amount

    def __call__(self, prompt: Prompts, budget: Prompts | None) -> Prompts:
        n = resolve(self.count, prompt, budget)
        return np.where(prompt <= self.shortest, np.maximum(n, prompt), n)


@value
class OfSeen:
    """A share of all tokens read so far, so that a budget grows while decoding (CompressionRatioDecodingPress).

    There are slots for `most` tokens. It is no less than what must stay; shares of the budget are shares of `most`. It
    is computed with 32 bits: of texts of millions of tokens it may be a token off.

    Attributes:
      share: in [0, 1].
      most: the ceiling, in tokens.
    """

    share: Proportion
    most: Size

    def __call__(self, prompt: Prompts, budget: Prompts | None) -> Prompts:
        return np.full_like(prompt, self.most, dtype=np.int64)

    def check(self, lengths: Prompts, max_new_tokens: int) -> None:
        """Refuses prompts with so many new tokens whose share is above the ceiling.

        Raises:
          ValueError: both numbers.
        """
        n = int(np.max(lengths, initial=0))
        if (need := int(self.share * (n + max_new_tokens) + 1e-9)) > self.most:
            raise ValueError(
                f"{self.share} of {n} tokens and room for {max_new_tokens} new ones are {need} tokens, but "
                f"most={self.most}; give most={need} or more, or plan for fewer new tokens"
            )


def known(n: Count, ctx: Context) -> Int[Array, "B"]:
    """A count in tokens for the sequences of a traced call, looked up by the lengths of their prompts."""
    lengths = np.arange(ctx.width + 1)
    table = np.minimum(resolve(n, lengths), MOST).astype(np.int32)
    return jnp.asarray(table)[ctx.prompt_length]


def apportion(shares: X, limit: X, xp: ModuleType = np, *, least: X | int = 0, first: X | int = 0) -> X:
    """Whole numbers near real shares, with the same total.

    What lacks to the least is taken from what others have beyond theirs, and what lies beyond a limit is spread over
    the others, both in proportion; then the largest remainders are rounded up.

    Args:
      shares: real numbers "*n L", divided along the last axis.
      limit: the most that each can get, of a shape that broadcasts to theirs. The total is cut to that of the limits.
      xp: `numpy` on the host, `jax.numpy` in traced code.
      least: the least that each gets, likewise; together no more than the shares.
      first: which of equal remainders are rounded up first, likewise: those with the larger number.

    Returns:
      int32 "*n L".
    """
    limit, least = (xp.broadcast_to(x, shares.shape).astype(shares.dtype) for x in (limit, least))
    total = xp.minimum(xp.round(shares.sum(-1, keepdims=True)), limit.sum(-1, keepdims=True))
    beyond = xp.maximum(shares - least, 0)
    mass = beyond.sum(-1, keepdims=True)
    raised = least + beyond * ((total - least.sum(-1, keepdims=True)) / xp.where(mass > 0, mass, 1))
    shares = xp.where((shares < least).any(-1, keepdims=True), raised, shares)
    if xp is np:
        for _ in range(shares.shape[-1]):
            shares = spread(shares, limit, np)
    else:
        shares = lax.fori_loop(0, shares.shape[-1], lambda _, x: spread(x, limit, jnp), shares)
    shares = xp.minimum(shares, limit)
    floor = xp.floor(shares)
    left = xp.where(floor < limit, shares - floor, -1)
    left = left if xp is np else xp.round(left * 1024)  # equals may differ by what floats of 32 bits lose
    order = xp.lexsort((-xp.broadcast_to(first, shares.shape), -left), axis=-1)
    rank = xp.argsort(order, axis=-1, stable=True)
    up = rank.astype(floor.dtype) < total - floor.sum(-1, keepdims=True)
    return floor.astype(np.int32) + up.astype(np.int32)


def spread(shares: X, limit: X, xp: ModuleType) -> X:
    """Shares of which what lies beyond the limit was given to the others."""
    over, shares = xp.maximum(shares - limit, 0).sum(-1, keepdims=True), xp.minimum(shares, limit)
    weight = xp.where(shares < limit, shares, 0)
    weight = xp.where(weight.sum(-1, keepdims=True) > 0, weight, limit - shares)
    mass = weight.sum(-1, keepdims=True)
    return shares + over * weight / xp.where(mass > 0, mass, 1)


# ------------------------------------------------------------------------------------------------- over layers


@value
class Even:
    """Every layer gets the average."""

    def __call__(self, average: Prompts, limit: Prompts, num_layers: int, outside: Prompts) -> Int[np.ndarray, "M L"]:
        """Tokens of each layer.

        Args:
          average: tokens of a layer on average.
          limit: tokens that there are to keep.
          num_layers: layers of the model.
          outside: tokens that every layer keeps beside these.
        """
        return np.repeat(average[:, None], num_layers, 1)


@value
class Pyramid:
    """Budgets that fall linearly from the first layer to the last (PyramidKV, arXiv 2406.02069, section 3.2).

    Attributes:
      beta: the last layer gets 1 / beta of the average; 1 for equal budgets.
    """

    beta: AtLeastOne = 20.0

    def __call__(self, average: Prompts, limit: Prompts, num_layers: int, outside: Prompts) -> Int[np.ndarray, "M L"]:
        last = average[:, None] / self.beta
        first = 2 * average[:, None] - last
        place = np.arange(num_layers) / max(num_layers - 1, 1)
        shares = first - (first - last) * place if num_layers > 1 else average[:, None] * 1.0
        return apportion(shares, limit[:, None], least=_one_if_bare(outside))


@value
class LayerShares:
    """Fixed shares of the layers, learned or measured.

    Attributes:
      weights: one a layer; a layer's share is its weight over their sum.
    """

    weights: tuple[NonNegative, ...]

    def __post_init__(self):
        if not sum(self.weights) > 0:
            raise ValueError(f"weights={self.weights} add up to {sum(self.weights)}; give one layer at least a share")

    def __call__(self, average: Prompts, limit: Prompts, num_layers: int, outside: Prompts) -> Int[np.ndarray, "M L"]:
        if len(self.weights) != num_layers:
            raise ValueError(f"LayerShares has {len(self.weights)} weights for {num_layers} layers; give one a layer")
        ratios = np.asarray(self.weights) * (num_layers / sum(self.weights))
        least = np.where(ratios > 0, _one_if_bare(outside), 0)
        return apportion(average[:, None] * ratios, limit[:, None], least=least)


def _one_if_bare(outside: Prompts) -> Int[np.ndarray, "M 1"]:
    """The least that a layer gets: a token, if it keeps none in any case."""
    return (outside == 0)[:, None].astype(np.int64)


# ------------------------------------------------------------------------------------------------- over heads


class Adaptive(Heads):
    """Heads compete for the layer's budget by their scores (Ada-KV, arXiv 2407.11550, Algorithm 1).

    Attributes:
      alpha: the share of the budget that is competed for; each head gets its part of the rest, and unless all of it is
        competed for, at least one token.
      max_ratio: no head gets more than this many times the average.
    """

    alpha: Proportion = 0.5
    max_ratio: Ratio = float("inf")

    def most(self, average: Prompts, limit: Prompts, info: LayerInfo) -> Prompts:
        all_in_one = _ceil(average * (1 - self.alpha + self.alpha * info.num_kv_heads))
        most = np.minimum(all_in_one, _ceil(average * min(self.max_ratio, info.num_kv_heads)))
        return np.minimum(most, np.maximum(limit, average))

    def __call__(self, score: Float[Array, "B K S"], average: Int[Array, "B"], slots: Slots) -> Int[Array, "B K"]:
        mean, ratio = average[:, None].astype(jnp.float32), min(self.max_ratio, score.shape[1])
        shares = self.alpha * won(score, average, slots) + (1 - self.alpha) * mean
        return whole(shares, score, slots, mean, ratio, least=bare(average, slots) & (self.alpha < 1))


class HeadShares(Heads):
    """Fixed shares of the kv heads, learned or measured.

    Attributes:
      weights: a row a layer with one weight a head; a head's share is its weight over the row's sum, and unless that is
        0, at least one token.
    """

    weights: tuple[tuple[NonNegative, ...], ...] = data()

    def _ratios(self, info: LayerInfo) -> Float[np.ndarray, "K"]:
        """The share of each head, in units of the average."""
        if len(self.weights) != info.num_layers or len(self.weights[info.layer]) != info.num_kv_heads:
            raise ValueError(
                f"HeadShares has {len(self.weights)} rows of {len(self.weights[0])} weights, but the model has "
                f"{info.num_layers} layers of {info.num_kv_heads} kv heads; give a row a layer with one weight a head"
            )
        row = np.asarray(self.weights[info.layer])
        return row * (len(row) / row.sum()) if row.any() else np.ones(len(row))  # of a layer that gets nothing

    def most(self, average: Prompts, limit: Prompts, info: LayerInfo) -> Prompts:
        return _ceil(average * self._ratios(info).max())

    def hparams(self, info: LayerInfo, lengths: Prompts, budget: Prompts) -> Float[Array, "M K"]:
        return jnp.asarray(np.repeat(self._ratios(info)[None], len(lengths), 0), jnp.float32)

    def __call__(self, score: Float[Array, "B K S"], average: Int[Array, "B"], slots: Slots) -> Int[Array, "B K"]:
        ratios, mean = slots.hparams, average[:, None].astype(jnp.float32)
        least = bare(average, slots) & (ratios > 0)
        return whole(mean * ratios, score, slots, mean, ratios.max(-1, keepdims=True), least=least)

    def lasting(self, shares: Int[Array, "B K"], average: Int[Array, "B"], slots: Slots) -> Int[Array, "B K"]:
        ratios, mean = slots.hparams, average[:, None].astype(jnp.float32)
        limit = _most(mean * ratios)
        bare = (average > 0)[:, None] & ~slots.protected.any(-1) & (ratios > 0)
        least = jnp.minimum(bare.astype(jnp.float32), limit)
        return apportion(mean * ratios, limit, jnp, least=least)


def head_curves(losses: Annotated[Any, numbers("R", "L", "K")], r: Proportion) -> dict[str, Any]:
    """The fields `budget`, `layers` and `heads` of an `Evict` from a table of what heads lose (LU-KV).

    As in `dataclasses.replace(policy, **head_curves(numpy.load(file), 0.5))`; arXiv 2602.08585. Shares are of what is
    left beside the tokens that stay in any case.

    Args:
      losses: the share of its tokens that each kv head of each layer loses, for the ratios 0.01, 0.02 and so on.
      r: the share of all tokens that go; the nearest of these ratios counts, or 0.

    Raises:
      ValueError: a share that the table has no row for, losses that are no shares, or of all tokens.
    """
    table, n = np.asarray(losses), round(100 * r)
    if n > len(table):
        raise ValueError(f"losses has rows for ratios up to {len(table) / 100:g}, but r={r}; give a table that has it")
    if not ((table >= 0) & (table <= 1)).all() or (n and (table[n - 1] == 1).all()):
        raise ValueError(
            f"losses are from {table.min():g} to {table.max():g}; give shares from 0 to 1, some of them less than 1"
        )
    stay = 1 - np.pad(table, ((1, 0), (0, 0), (0, 0)))[n]
    layers, heads = LayerShares(tuple(stay.mean(1).tolist())), HeadShares(tuple(map(tuple, stay.tolist())))
    return {"budget": float(stay.mean()), "layers": layers, "heads": heads}


def _ceil(x: np.ndarray) -> Prompts:
    return np.ceil(x - 1e-9).astype(np.int64)


def _most(x: Float[Array, "B _"]) -> Float[Array, "B _"]:
    """Rounded up, but for what floats of 32 bits make of a whole number."""
    return jnp.ceil(x * (1 - 1e-6) - 1e-4)


def won(score: Float[Array, "B K S"], average: Int[Array, "B"], slots: Slots) -> Float[Array, "B K"]:
    """How many of the layer's best candidates, `average` a head, each head has."""
    B, K, S = score.shape
    flat = jnp.where(slots.candidates, score, -jnp.inf).reshape(B, K * S)
    rank = jnp.argsort(jnp.argsort(-flat, axis=-1, stable=True), axis=-1)
    return ((rank < K * average[:, None]) & (flat > -jnp.inf)).reshape(B, K, S).sum(-1).astype(jnp.float32)


def bare(average: Int[Array, "B"], slots: Slots) -> Bool[Array, "B K"]:
    """Heads that would be left without a token if they got none."""
    return (average > 0)[:, None] & slots.candidates.any(-1) & ~slots.protected.any(-1)


def whole(
    shares: Float[Array, "B K"],
    score: Float[Array, "B K S"],
    slots: Slots,
    mean: Float[Array, "B 1"],
    ratio: int | float | Float[Array, "B 1"],
    *,
    least: Bool[Array, "B K"],
) -> Int[Array, "B K"]:
    """Shares of heads in whole tokens, whose mean is `mean`.

    Equal remainders are rounded up in the order of the heads' best scores, so that heads may be numbered in any order.

    Args:
      shares: what heads should get.
      score: of all slots.
      slots: where `candidates` says how many tokens each head can keep.
      mean: tokens of a head on average.
      ratio: no head gets more than this many times the mean, nor more than it can keep if that is beyond the mean.
      least: heads that get at least one token.
    """
    exist = slots.candidates.sum(-1).astype(jnp.float32)
    shares = jnp.where(exist.mean(-1, keepdims=True) <= mean, exist, shares)
    shares = shares + (mean - shares.mean(-1, keepdims=True))
    limit = jnp.minimum(jnp.maximum(exist, mean), _most(mean * ratio))
    first = jnp.where(slots.candidates, score, -jnp.inf).max(-1)
    return apportion(shares, limit, jnp, least=least, first=first)


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
    every: Size | None = None
    over: Size | None = None
    drop: Count = count(default=0)
    before: bool = False

    def __post_init__(self):
        if self.every is not None and self.over is not None:
            raise ValueError(f"Schedule(every={self.every}, over={self.over}): give one of them, not both")
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

kinds.doors(__name__, "head_curves")
