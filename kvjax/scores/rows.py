"""Scores that look at the prompt's last rows one by one, where their sum does not say enough."""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.contract import (
    Count,
    LayerInfo,
    NonNegative,
    Observation,
    Odd,
    Phase,
    Prompts,
    Proportion,
    Score,
    Size,
    Slots,
    count,
    resolve,
)
from kvjax.observe import ProjectedValueNorm, Rows, by_row, votes
from kvjax.scores.blends import layer_mean, pool_in_order


def mean_and_variance(
    rows: Float[Array, "B K G R S"], exist: Bool[Array, "B 1 1 R 1"]
) -> tuple[Float[Array, "B K G S"], Float[Array, "B K G S"]]:
    """The mean and the variance (of a sample) over the rows that exist."""
    n = jnp.maximum(exist.sum(3), 1).astype(jnp.float32)
    mean = rows.sum(3) / n
    square = jnp.where(exist, jnp.square(rows - mean[:, :, :, None]), 0.0).sum(3)
    return mean, square / jnp.maximum(n - 1, 1)


def pool_rows(
    rows: Float[Array, "B K G R S"], pos: Int[Array, "B K S"], among: Bool[Array, "B K S"], kind: str, kernel: Odd
) -> Float[Array, "B K G R S"]:
    """Every row pooled over neighbours in position among some slots."""
    B, K, G, R, S = rows.shape
    pos, among = (jnp.repeat(x, G * R, axis=1) for x in (pos, among))
    return pool_in_order(rows.reshape(B, K * G * R, S), pos, among, kind, kernel).reshape(rows.shape)


class PooledVotes(Score):
    """The attention of the prompt's last rows, each pooled before they are added (text of Ada-KV, arXiv 2407.11550).

    Attributes:
      rows: how many rows vote.
      kernel: width of the pooling, which takes the largest; odd.
      group: how the query heads of a kv head become one.
      softmax: another softmax than the model's.
    """

    rows: Size = 32
    kernel: Odd = 7
    group: Literal["mean", "max", "sum"] = "mean"
    softmax: Callable[..., Any] | None = None

    @property
    def _votes(self) -> Rows:
        return Rows(self.rows, group=None, softmax=self.softmax, summed=False)

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self._votes,) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        rows, exist = by_row(self._votes, slots)
        mean = pool_rows(rows, slots.kv.pos, slots.candidates, "max", self.kernel).sum(3)
        mean = jnp.where(slots.candidates[:, :, None], mean, 0.0) / jnp.maximum(exist.sum(3), 1).astype(jnp.float32)
        return {"mean": jnp.mean, "max": jnp.max, "sum": jnp.sum}[self.group](mean, axis=2)


class Peak(Score):
    """The most that any of the last rows gives a token in each query head, then the mean over its group (KVCompose).

    Attributes:
      rows: how many of the prompt's last rows vote.
    """

    rows: Size = 32

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (votes(self.rows),) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return by_row(votes(self.rows), slots)[0].max(3).mean(2)


class Unsteady(Score):
    r"""The mean attention of the last rows plus a multiple of its variance, $\mu + \gamma \sigma^2$ (CAKE).

    Attributes:
      rows: how many of the prompt's last rows vote.
      variance: $\gamma$.
    """

    rows: Size = 32
    variance: NonNegative = 200.0

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (votes(self.rows),) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        mean, variance = mean_and_variance(*by_row(votes(self.rows), slots))
        return (mean + self.variance * variance).mean(2)


class Defensive(Score):
    """The most that any row gives a token, never less than its head's mean, times its value's weight (DefensiveKV).

    The fewest tokens of a head that hold `mass` of its attention come before all others (arXiv 2510.13334).

    Attributes:
      most: a budget, window included: no more tokens than it leaves for others than the window come first.
      rows: how many of the prompt's last rows vote.
      kernel: every row is averaged over so many neighbours; odd.
      mass: the share of a head's attention whose tokens come first.
    """

    most: Count = count()
    rows: Size = 32
    kernel: Odd = 5
    mass: Proportion = 0.9

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (votes(self.rows), ProjectedValueNorm()) if phase == "prefill" else ()

    def hparams(self, info: LayerInfo, lengths: Prompts, budget: Prompts) -> Int[Array, "M"]:
        most = np.maximum(resolve(self.most, lengths, budget) - self.rows, 0)
        return jnp.asarray(np.minimum(most, lengths), jnp.int32)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        among, (rows, exist) = slots.candidates, by_row(votes(self.rows), slots)
        rows = jnp.where(among[:, :, None, None], rows, 0.0)
        score = self._worst(rows, slots) * self._value_share(slots)
        mean = rows.sum(3).mean(2) / jnp.maximum(exist.sum(3), 1).astype(jnp.float32)[..., 0]
        first = self._first(mean, slots)
        return jnp.where(first, score.max((1, 2), keepdims=True) + mean, score)

    def _worst(self, rows: Float[Array, "B K G R S"], slots: Slots) -> Float[Array, "B K S"]:
        """The most that any pooled row gives a token, at least the head's mean of it."""
        among = slots.candidates
        pooled = pool_rows(rows, slots.kv.pos, among, "avg", self.kernel)
        pooled = jnp.where(among[:, :, None, None], pooled, 0.0)
        now = pooled.sum(-1, keepdims=True)
        worst = (pooled * rows.sum(-1, keepdims=True) / jnp.where(now > 0, now, 1.0)).max((2, 3))
        n = jnp.maximum(among.sum(-1, keepdims=True), 1).astype(jnp.float32)
        return jnp.maximum(worst, jnp.where(among, worst, 0.0).sum(-1, keepdims=True) / n)

    def _value_share(self, slots: Slots) -> Float[Array, "B K S"]:
        """The share that a token's projected value has of those of all kv heads."""
        norm = jnp.where(slots.candidates, slots.stats[ProjectedValueNorm()], 0.0)
        total = norm.shape[1] * layer_mean(norm, slots.kv.pos)
        return norm / jnp.where(total > 0, total, 1.0)

    def _first(self, mean: Float[Array, "B K S"], slots: Slots) -> Bool[Array, "B K S"]:
        """The tokens that hold `mass` of the attention, what the last tokens before the window hold being counted."""
        kv, among = slots.kv, slots.candidates
        last = among & (kv.pos >= (slots.ctx.length - 2 * self.rows)[:, None, None])
        beside = jnp.where(last, mean, 0.0).sum(-1).mean(1)
        order = jnp.lexsort((-kv.pos, jnp.where(among, -mean, 1.0)), axis=-1)
        held = jnp.take_along_axis(mean, order, -1)
        whole = held.sum(-1, keepdims=True)
        share = jnp.cumsum(held, -1) / jnp.where(whole > 0, whole, 1.0)
        first = jnp.minimum((share < (self.mass - beside)[:, None, None]).sum(-1), slots.hparams[:, None])
        return among & (jnp.argsort(order, axis=-1) < first[..., None])
