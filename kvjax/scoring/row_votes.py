"""Scores that look at the prompt's last rows one by one, where a sum over them does not say enough."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.context import Context, Phase
from kvjax.cache.state import LayerKV
from kvjax.pallas_kernels.values import number, one_of, settle, tokens
from kvjax.scoring.measurements import ProjectedValueNorm
from kvjax.scoring.scores import Score, kernel_width, mean_over_heads, pool_in_order
from kvjax.scoring.stats import LastRows, LayerStats, Measurement, Observe, Slots
from kvjax.sizes.budget import Count, as_count, counted, lookup


@dataclasses.dataclass(frozen=True)
class LastVotes:
    """The attention of the prompt's last rows, row by row and for every query head.

    Attributes:
      rows: how many rows.
    """

    rows: int

    @property
    def observed(self) -> Observe:
        """What must be measured."""
        return Observe(LastRows(self.rows), group=None, summed=False)

    def votes(
        self, kv: LayerKV, stats: LayerStats, ctx: Context
    ) -> tuple[Float[Array, "B K G R S"], Bool[Array, "B 1 1 R 1"]]:
        """What every row gives every slot, and which rows exist: where a text has fewer, those before it do not."""
        rows = stats[self.observed].astype(jnp.float32)
        B, N, R, S = rows.shape
        K = kv.pos.shape[1]
        exists = jnp.arange(R, dtype=jnp.int32)[None] >= R - ctx.length[:, None]
        exists = exists[:, None, None, :, None]
        return jnp.where(exists, rows.reshape(B, K, N // K, R, S), 0.0), exists


def _count(exists: Bool[Array, "B 1 1 R 1"]) -> Float[Array, "B 1 1 1"]:
    return jnp.maximum(exists.sum(3, dtype=jnp.int32), 1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class MeanAndVariance(Score):
    """The mean of what the last rows give a token, plus a multiple of its variance over them (CAKE, Eq. 8).

    Attributes:
      rows: the prompt's last rows, whose votes count.
      variance: the multiple. The variance is that of a sample, over rows - 1.
      group: how the query heads of a kv head are combined after that.
    """

    rows: int = 32
    variance: float = 200.0
    group: Literal["mean", "max"] = "mean"

    def __post_init__(self):
        settle(
            self,
            rows=tokens(1, "at least one row must be observed"),
            variance=number("[0, inf)", "a multiple of variances is finite, not negative"),
        )
        one_of("MeanAndVariance.group", self.group, "mean", "max")

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return False

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return (LastVotes(self.rows).observed,) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        votes, exists = LastVotes(self.rows).votes(slots.kv, slots.stats, slots.ctx)
        mean, variance = mean_and_variance(votes, exists)
        each = mean + self.variance * variance
        return each.mean(2) if self.group == "mean" else each.max(2)


def mean_and_variance(
    votes: Float[Array, "B K G R S"], exists: Bool[Array, "B 1 1 R 1"]
) -> tuple[Float[Array, "B K G S"], Float[Array, "B K G S"]]:
    """Over the rows that exist; the variance of a sample."""
    count = _count(exists)
    mean = votes.sum(3) / count
    square = jnp.where(exists, jnp.square(votes - mean[:, :, :, None]), 0.0).sum(3)
    return mean, square / jnp.maximum(count - 1, 1)


@dataclasses.dataclass(frozen=True)
class Defensive(Score):
    r"""The most that any row of the window gives a token, and never less than the mean (DefensiveKV, arXiv 2510.13334).

    Every row is averaged over neighbouring candidates and scaled to the mass it had. A token's worst case is the
    largest of its votes over rows and query heads, raised to the mean of its head's (section 4). It is multiplied by
    $\lVert v_j W_O\rVert_1$ as a share of what all kv heads have at that place. Tokens that hold most of the attention
    come first whatever that product: the best by mean attention, until those before them hold `mass` less what the
    window's rows give the last candidates, as many as there are rows.

    Attributes:
      rows: the prompt's last rows, whose votes count.
      pool: every row is averaged over so many neighbouring candidates, zeros beyond the edges counted; odd.
      mass: of the attention to candidates.
      most: no head puts more tokens first than this leaves beside the window: the budget, in tokens (int), as a share
        of the prompt (float), or another count.
    """

    most: int | float | Count
    rows: int = 32
    pool: int = 5
    mass: float = 0.9

    def __post_init__(self):
        settle(
            self,
            most=counted,
            rows=tokens(1, "at least one row must be observed"),
            pool=kernel_width,
            mass=number("[0, 1]", "a share of the attention lies in [0, 1]"),
        )

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return False

    @property
    def by_head(self) -> bool:
        """See `Score`."""
        return False

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return (LastVotes(self.rows).observed, ProjectedValueNorm()) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv, ctx, among = slots.kv, slots.ctx, slots.candidates
        votes, exists = LastVotes(self.rows).votes(kv, slots.stats, ctx)
        votes = jnp.where(among[:, :, None, None], votes, 0.0)
        worst = self._pooled(votes, kv, among).max((2, 3))
        count = jnp.maximum(among.sum(-1, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        risk = jnp.maximum(worst, jnp.where(among, worst, 0.0).sum(-1, keepdims=True) / count)
        norm = jnp.where(among, slots.stats[ProjectedValueNorm()].astype(jnp.float32), 0.0)
        total = norm.shape[1] * mean_over_heads(norm, kv)
        score = risk * norm / jnp.where(total > 0, total, 1.0)

        mean = votes.sum(3).mean(2) / _count(exists)[..., 0]
        last = among & (kv.pos >= (ctx.length - 2 * self.rows)[:, None, None])
        beside = jnp.where(last, mean, 0.0).sum(-1).mean(1)
        first = self._first(mean, among, kv, self.mass - beside, ctx)
        # All that comes first comes before all else, in the order of attention.
        return jnp.where(first, score.max((1, 2), keepdims=True) + mean, score)

    def _pooled(
        self, votes: Float[Array, "B K G R S"], kv: LayerKV, among: Bool[Array, "B K S"]
    ) -> Float[Array, "B K G R S"]:
        B, K, G, R, S = votes.shape
        repeated = lambda x: jnp.repeat(x, G * R, axis=1)
        flat = votes.reshape(B, K * G * R, S), repeated(kv.pos), repeated(among)
        pooled = pool_in_order(*flat, "avg", self.pool, "zero").reshape(votes.shape)
        pooled = jnp.where(among[:, :, None, None], pooled, 0.0)
        mass, now = votes.sum(-1, keepdims=True), pooled.sum(-1, keepdims=True)
        return pooled * mass / jnp.where(now > 0, now, 1.0)

    def _first(
        self,
        mean: Float[Array, "B K S"],
        among: Bool[Array, "B K S"],
        kv: LayerKV,
        mass: Float[Array, "B"],
        ctx: Context,
    ) -> Bool[Array, "B K S"]:
        """The tokens before the one with which the best of a head hold `mass` of what it gives its candidates."""
        order = jnp.lexsort((-kv.pos, jnp.where(among, -mean, 1.0)), axis=-1)  # best first; of equals the newest
        sorted_mean = jnp.take_along_axis(mean, order, axis=-1)
        total = sorted_mean.sum(-1, keepdims=True)
        share = jnp.cumsum(sorted_mean, axis=-1) / jnp.where(total > 0, total, 1.0)
        before = (share < mass[:, None, None]).sum(-1, dtype=jnp.int32)
        count = jnp.minimum(before, self._most(ctx)[:, None])
        rank = jnp.broadcast_to(jnp.arange(mean.shape[-1], dtype=jnp.int32), mean.shape)
        rank = jnp.put_along_axis(jnp.zeros_like(rank), order, rank, axis=-1, inplace=False)
        return among & (rank < count[..., None])

    def _most(self, ctx: Context) -> Int[Array, "B"]:
        lengths = np.arange(ctx.site.prompt_len + 1)
        table = np.maximum(as_count(self.most, "most").table(lengths, lengths) - self.rows, 0)
        return lookup(np.minimum(table, lengths), ctx.prompt_length)
