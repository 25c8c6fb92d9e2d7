"""Scores made of other scores: pooled, averaged over heads, weighted by values, standardized, added up."""

import functools
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.contract import EMPTY, Odd, Score, Slots
from kvjax.storage import in_order
from kvjax.storage.mesh import DATA, apart


class OfScore(Score):
    """A score made of another one, which observes and remembers.

    Attributes:
      score: the other one.
    """

    score: Score


class LayerMean(OfScore):
    """The mean of a score over all kv heads, so that all of them keep the same tokens.

    A head that has lost a token gives it 0.
    """

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return apart(slots.kv.how.mesh, layer_mean, self.score(slots.of("score")), slots.kv.pos, axes=(DATA,))


class LayerMost(OfScore):
    """The largest score that a token has in any kv head, so that all of them keep the same tokens."""

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return apart(slots.kv.how.mesh, layer_most, self.score(slots.of("score")), slots.kv.pos, axes=(DATA,))


def layer_mean(x: Float[Array, "B K S"], pos: Int[Array, "B K S"], most: bool = False) -> Float[Array, "B K S"]:
    """The mean over heads of what the tokens of one position have, on their slots; or the `most` of it."""
    B, K, S = x.shape

    def by_slot() -> Array:
        return jnp.broadcast_to(x.max(1, keepdims=True) if most else x.mean(1, keepdims=True), x.shape)

    def by_position() -> Array:
        found = sum_by_position(x.reshape(B, K * S), pos.reshape(B, K * S), most=most)
        return (found if most else found / K).reshape(x.shape)

    return lax.cond((pos == pos[:, :1]).all(), by_slot, by_position)


layer_most = functools.partial(layer_mean, most=True)


def sum_by_position(x: Float[Array, "R M"], pos: Int[Array, "R M"], *, most: bool = False) -> Float[Array, "R M"]:
    """For every number the sum, or the `most`, of those of its row at its position; 0 where that is EMPTY."""
    row, order = jnp.arange(len(x))[:, None], jnp.argsort(pos, axis=-1)
    place = jnp.take_along_axis(pos, order, -1)
    group = jnp.cumsum(place != jnp.roll(place, 1, -1), -1)
    total, own = jnp.full_like(x, -jnp.inf if most else 0.0).at[row, group], jnp.take_along_axis(x, order, -1)
    total = total.max(own) if most else total.add(own)
    found = jnp.put_along_axis(x, order, total[row, group], -1, inplace=False)
    return jnp.where(pos == EMPTY, 0.0, found)


class Pooled(OfScore):
    """A score pooled over neighbouring candidates, so that tokens stay with their surroundings.

    Neighbours are neighbours in position among the candidates of a head, whatever their slots.

    Attributes:
      kind: "max" or "avg".
      kernel: how many neighbours, the token itself in the middle; odd.
      pad: beyond either end, "zero" counts zeros in an average, as torch does; "valid" counts nothing.
    """

    kind: Literal["max", "avg"] = "max"
    kernel: Odd = 7
    pad: Literal["zero", "valid"] = "zero"

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        score = self.score(slots.of("score"))
        return pool_in_order(score, slots.kv.pos, slots.candidates, self.kind, self.kernel, self.pad)


def pool_in_order(
    x: Float[Array, "B K S"],
    pos: Int[Array, "B K S"],
    among: Bool[Array, "B K S"],
    kind: str,
    kernel: Odd,
    pad: str = "zero",
) -> Float[Array, "B K S"]:
    """Numbers pooled over neighbours in position.

    Args:
      x: the numbers.
      pos: positions of the slots.
      among: the slots that are pooled.
      kind, kernel, pad: as of `Pooled`.
    """
    if kernel == 1:
        return x
    order, half = in_order(jnp.where(among, pos, EMPTY)), kernel // 2
    window = (1, 1, kernel), (1, 1, 1), ((0, 0), (0, 0), (half, half))
    slide = lambda y, start, combine: lax.reduce_window(y, start, combine, *window)
    start, combine = (-jnp.inf, lax.max) if kind == "max" else (0.0, lax.add)
    pooled = slide(jnp.take_along_axis(jnp.where(among, x, start), order, -1), start, combine)
    if kind == "avg" and pad == "zero":
        pooled = pooled / kernel
    elif kind == "avg":
        inside = jnp.take_along_axis(among, order, -1).astype(x.dtype)
        pooled = pooled / jnp.maximum(slide(inside, 0.0, lax.add), 1.0)
    return jnp.put_along_axis(x, order, pooled, -1, inplace=False)


class Logarithm(OfScore):
    """The logarithm of a score, so that a draw by the softmax of scores is one in proportion to it."""

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return jnp.log(jnp.maximum(self.score(slots.of("score")), jnp.finfo(jnp.float32).tiny))


class ValueWeighted(OfScore):
    """A score times a norm of the token's value.

    Attributes:
      norm: "l2" of the token's own value; "largest": the largest L1 norm among the candidates of its kv head, by which
        heads are compared (LAVa).
    """

    norm: Literal["l2", "largest"] = "l2"

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        score, v = self.score(slots.of("score")), slots.kv.v.astype(jnp.float32)
        if self.norm == "l2":
            return score * jnp.sqrt(jnp.square(v).sum(-1))
        return score * jnp.where(slots.candidates, jnp.abs(v).sum(-1), 0.0).max(-1, keepdims=True)


class Standardized(OfScore):
    """A score less its mean over the layer's candidates, over their standard deviation (of a sample)."""

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        score, among = self.score(slots.of("score")).astype(jnp.float32), slots.candidates

        def total(x: Array) -> Array:
            return jnp.where(among, x, 0.0).sum((1, 2), keepdims=True)

        n = total(jnp.ones_like(score))
        mean = total(score) / jnp.maximum(n, 1)
        return (score - mean) / jnp.maximum(jnp.sqrt(total(jnp.square(score - mean)) / jnp.maximum(n - 1, 1)), 1e-6)


class Blend(Score):
    """A weighted sum of scores.

    Attributes:
      scores, weights: as many of either.
    """

    scores: tuple[Score, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.weights) or not self.scores:
            raise ValueError(f"{len(self.scores)} scores have {len(self.weights)} weights; give every score a weight")

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        each = [score(slots.of("scores", i)).astype(jnp.float32) for i, score in enumerate(self.scores)]
        return sum((w * x for w, x in zip(self.weights[1:], each[1:], strict=True)), start=self.weights[0] * each[0])
