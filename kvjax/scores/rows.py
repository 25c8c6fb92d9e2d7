"""Scores that look at the prompt's last rows one by one, where their sum does not say enough."""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

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
from kvjax.scores.attention import RowByRow
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

    The fewest tokens of a head that hold `mass` of its attention come before all others (arXiv 2510.13334); those that
    stay in any case, the window aside, are of them.

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
        before = slots.kv.live & (slots.kv.pos < (slots.ctx.length - self.rows)[:, None, None])
        mean = jnp.where(before[:, :, None, None], rows, 0.0).sum(3).mean(2)
        mean /= jnp.maximum(exist.sum(3), 1).astype(jnp.float32)[..., 0]
        rows = jnp.where(among[:, :, None, None], rows, 0.0)
        score = self._worst(rows, slots) * self._value_share(slots)
        first = self._first(mean, before, slots)
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

    def _first(self, mean: Float[Array, "B K S"], before: Bool[Array, "B K S"], slots: Slots) -> Bool[Array, "B K S"]:
        """The tokens that hold `mass` of the attention, what the last tokens before the window hold being counted."""
        kv, among = slots.kv, slots.candidates
        last = among & (kv.pos >= (slots.ctx.length - 2 * self.rows)[:, None, None])
        beside = jnp.where(last, mean, 0.0).sum(-1).mean(1)
        rank = jnp.where(before & ~among, -jnp.inf, -mean)  # what stays is held before all others
        order = jnp.lexsort((-kv.pos, jnp.where(before, rank, 1.0)), axis=-1)
        held = jnp.take_along_axis(mean, order, -1)
        whole = held.sum(-1, keepdims=True)
        share = jnp.cumsum(held, -1) / jnp.where(whole > 0, whole, 1.0)
        first = jnp.minimum((share < (self.mass - beside)[:, None, None]).sum(-1), slots.hparams[:, None])
        return among & (jnp.argsort(order, axis=-1) < first[..., None])


class OutputChange(RowByRow):
    r"""How far the last rows' outputs move if a token goes alone (DropKV, kvpress pull 285).

    $(p_{ij} / (1 - p_{ij}))^2 \lVert v_j - o_i \rVert^2$, the squared change of row $i$'s output $o_i = \sum_k p_{ik}
    v_k$ once its softmax is one over the other tokens; the mean over rows and the group's query heads. A row that has
    all its attention on one token answers nothing without it: its whole output counts, $\lVert v_j \rVert^2$. That is
    where $1 - p$ is below $10^{-6}$, of which 32 bits hold too little; kvpress adds $10^{-6}$ to $1 - p$ instead.

    Attributes:
      prompt_only: rows of generated tokens do not count, and nothing is remembered.
    """

    prompt_only: bool = True

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (votes(self.rows),) if phase == "prefill" or not self.prompt_only else ()

    def given(self, slots: Slots) -> Float[Array, "B K R S"]:
        v = slots.kv.v.astype(jnp.float32)

        def change(p: Float[Array, "B K G S"]) -> Float[Array, "B K S"]:  # of one row, so that no two are held at once
            moved = jnp.square(v[:, :, None] - jnp.einsum("bkgs,bksv->bkgv", p, v)[..., None, :]).sum(-1)
            alone = 1 - p < 1e-6
            return jnp.where(
                alone, jnp.square(v).sum(-1)[:, :, None], jnp.square(p / jnp.where(alone, 1, 1 - p)) * moved
            ).mean(2)

        rows, _ = by_row(votes(self.rows), slots)
        return jnp.moveaxis(lax.map(change, jnp.moveaxis(rows, 3, 0)), 0, 2)

    def memory(self, info: LayerInfo) -> PyTree:
        return () if self.prompt_only else super().memory(info)

    def update(self, slots: Slots) -> PyTree:
        return () if self.prompt_only else super().update(slots)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return self.given(slots).sum(2) / self.read(slots) if self.prompt_only else super().__call__(slots)
