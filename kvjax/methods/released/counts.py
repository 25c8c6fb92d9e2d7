"""Counts, and divisions over layers and heads, that released code has and papers do not."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.budgets import Adaptive, bare, whole, won
from kvjax.contract import AtLeastOne, Count, Heads, LayerInfo, Prompts, Proportion, Size, Slots, Tree, resolve, value
from kvjax.decide.select import best


@value
class Truncated:
    """A share in whole tokens, `int(n * share)`, with the errors that binary fractions bring into the product (D-45).

    Attributes:
      share: the share.
      of: of which count; None for the prompt.
    """

    share: Proportion
    of: Count | None = None

    def __call__(self, prompt: Prompts, budget: Prompts | None) -> Prompts:
        """Tokens "M" for prompts "M"."""
        n = prompt if self.of is None else resolve(self.of, prompt, budget)
        return np.floor(n * self.share).astype(np.int64)


@value
class BlockBudget:
    """The tokens that EasyKV's loop over blocks leaves, so that its blocks of `stride` end with the prompt (D-14).

    A prompt that is not evicted from keeps the budget.

    Attributes:
      budget: what was asked for.
      stride: tokens of a block.
    """

    budget: Count
    stride: Size

    def __call__(self, prompt: Prompts, budget: Prompts | None) -> Prompts:
        """Tokens "M" for prompts "M"."""
        asked = resolve(self.budget, prompt, budget)
        final = asked + self.stride - (asked + self.stride - prompt) % self.stride
        return np.where(final > prompt, asked, final)


@value
class WholeIfShort:
    """A budget, but all of a prompt, or the least number that is to stay, where it does not hold that number.

    Attributes:
      budget: the budget.
      least: tokens that are to stay.
    """

    budget: Count
    least: Count

    def __call__(self, prompt: Prompts, budget: Prompts | None) -> Prompts:
        """Tokens "M" for prompts "M"."""
        asked, least = resolve(self.budget, prompt, budget), resolve(self.least, prompt, budget)
        return np.where(asked < least, np.maximum(prompt, least), asked)


# ------------------------------------------------------------------------------------------------ over layers


@value
class FloorPyramid:
    """The pyramid of PyramidKV's released code, in whole steps, whose total exceeds the budget (D-41).

    The last layer gets `b // beta`, the first `2 b - b // beta` or what exists; layers are `(first - last) // (L - 1)`
    apart.

    Attributes:
      beta: steepness.
      uniform: all layers get `b` where the prompt is shorter than `2 b` (KVCache-Factory; AdaKV lacks this, D-42).
    """

    beta: AtLeastOne = 20.0
    uniform: bool = True

    def __call__(self, average: Prompts, limit: Prompts, num_layers: int, outside: Prompts) -> Int[np.ndarray, "M L"]:
        """Tokens of every layer, the `outside` ones not counted."""
        if num_layers == 1:
            return average[:, None]
        first = np.minimum(2 * average - np.floor(average / self.beta).astype(np.int64), limit)
        step = (first - (2 * average - first)) // (num_layers - 1)
        layers = np.maximum(first[:, None] - step[:, None] * np.arange(num_layers), (outside == 0)[:, None])
        short = self.uniform & (limit + outside < 2 * average)
        return np.where(short[:, None], average[:, None], layers)


@value
class InclusivePyramid:
    """The pyramid of kvpress, in which windows are a part of every layer's share (D-43).

    With `B` the whole budget the last layer has `B / beta` tokens and the first `2 B - B / beta`, each rounded half to
    even; all have `B` where the prompt is too short for that, or the last layer's share does not hold the window.

    Attributes:
      beta: steepness.
      share: the budget as a share of the prompt, whose fraction counts; None for one in tokens.
    """

    beta: AtLeastOne = 20.0
    share: Proportion | None = None

    def __call__(self, average: Prompts, limit: Prompts, num_layers: int, outside: Prompts) -> Int[np.ndarray, "M L"]:
        """Tokens of every layer, the window not counted."""
        given = (average + outside).astype(np.float64)
        exact = given if self.share is None else self.share * (limit + outside)
        exact = np.where((average >= limit) & (average > 0), given, exact)
        budget = (outside + exact) - outside  # its last digits too are those of kvpress
        last = budget / self.beta
        first = 2 * budget - last
        first, last = np.minimum(first, limit), np.where(first >= limit, 2 * budget - limit, last)
        slope = (first - last) / max(num_layers - 1, 1)
        falls = (first >= last) & (last >= outside) & (num_layers > 1)
        layers = np.where(falls[:, None], first[:, None] - slope[:, None] * np.arange(num_layers), exact[:, None])
        return np.maximum(np.round(layers).astype(np.int64) - outside[:, None], (outside == 0)[:, None])


# ------------------------------------------------------------------------------------------------ over heads


class HalfEven(Adaptive):
    """The competition of heads as Ada-KV's code rounds it: every head for itself, half to even (D-21).

    A layer's total drifts by up to half a token a head. Use it with `DriftingTopK`.
    """

    def __call__(self, score: Float[Array, "B K S"], average: Int[Array, "B"], slots: Slots) -> Int[Array, "B K"]:
        own = won(score, average, slots)
        mean, exist = average[:, None].astype(jnp.float32), slots.candidates.sum(-1).astype(jnp.float32)
        rounded = jnp.round(self.alpha * own + jnp.floor((1 - self.alpha) * mean + 1e-6))
        rounded = jnp.maximum(rounded, (bare(average, slots) & (self.alpha < 1)).astype(jnp.float32))
        most = jnp.minimum(exist, jnp.ceil(mean * min(self.max_ratio, score.shape[1]) - 1e-4))
        every = super().__call__(score, average, slots)
        return jnp.where(exist.mean(-1, keepdims=True) <= mean, every, jnp.minimum(rounded, most).astype(jnp.int32))


class Normalized(Heads):
    """Divides by scores that are multiplied by the share of attention in a head's best tokens (KVCache-Factory, D-26).

    Attributes:
      heads: the division that gets these scores.
    """

    heads: Heads

    def most(self, average: Prompts, limit: Prompts, info: LayerInfo) -> Prompts:
        return self.heads.most(average, limit, info)

    def __call__(self, score: Float[Array, "B K S"], average: Int[Array, "B"], slots: Slots) -> Int[Array, "B K"]:
        score, budgets = jnp.where(slots.candidates, score, 0.0), jnp.broadcast_to(average[:, None], score.shape[:2])
        among = best(jnp.where(slots.candidates, score, -jnp.inf), slots.kv.pos, budgets) & slots.candidates
        mass, total = jnp.where(among, score, 0.0).sum(-1, keepdims=True), score.sum(-1, keepdims=True)
        scaled = score * jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)
        return self.heads(scaled, average, slots.of("heads"))

    def lasting(self, shares: Int[Array, "B K"], average: Int[Array, "B"], slots: Slots) -> Int[Array, "B K"]:
        return self.heads.lasting(shares, average, slots.of("heads"))


class FloorThenGlobal(Heads):
    """Keeps every head's best, a share of its budget, and gives the rest to the best of the layer (kvpress, D-22).

    Attributes:
      alpha: the share of a head's budget that is safe, protected tokens included; one token at least, unless it is 0.
    """

    alpha: Proportion = 0.2

    def hparams(self, info: LayerInfo, lengths: Prompts, budget: Prompts) -> PyTree:
        safe = np.maximum(np.floor(budget * self.alpha).astype(np.int64), int(self.alpha > 0))
        return Tree(safe=jnp.asarray(safe, jnp.int32), budget=jnp.asarray(budget, jnp.int32))

    def most(self, average: Prompts, limit: Prompts, info: LayerInfo) -> Prompts:
        return np.minimum(info.num_kv_heads * average, np.maximum(limit, average))

    def __call__(self, score: Float[Array, "B K S"], average: Int[Array, "B"], slots: Slots) -> Int[Array, "B K"]:
        outside = slots.hparams.budget - average
        safe = jnp.broadcast_to(jnp.maximum(slots.hparams.safe - outside, 0)[:, None], score.shape[:2])
        score = jnp.where(slots.candidates, score, -jnp.inf)
        first = best(score, jnp.where(slots.candidates, slots.kv.pos, -1), safe)
        score, mean = jnp.where(first, jnp.inf, score), average[:, None].astype(jnp.float32)
        least = bare(average, slots) & (self.alpha > 0)
        return whole(won(score, average, slots), score, slots, mean, score.shape[1], least=least)
