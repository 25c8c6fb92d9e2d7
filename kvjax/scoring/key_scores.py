"""Scores that look at keys and values alone, or at a model of the queries to come."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax.cache.context import Phase
from kvjax.cache.state import EMPTY, LayerKV, position_order
from kvjax.scoring.measurements import FutureQueries, KeyBias
from kvjax.scoring.scores import Score
from kvjax.scoring.stats import Measurement, Slots
from pallas_kernels import Columns, attention
from pallas_kernels.values import a, flag, number, settle, tokens


@dataclasses.dataclass(frozen=True)
class KeyNorm(Score):
    """Small keys are worth more: minus their L2 norm (arXiv 2406.11430). Rotation does not change it."""

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv = slots.kv
        return -jnp.linalg.norm(kv.k.astype(jnp.float32), axis=-1)


@dataclasses.dataclass(frozen=True)
class KeyDifference(Score):
    """Keys unlike the others are worth more: minus the cosine to the mean unit key (KeyDiff, arXiv 2504.15364)."""

    @property
    def rotated_keys(self) -> bool:
        """See `Score`."""
        return True

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv = slots.kv
        unit, anchor = self.directions(kv)
        anchor = anchor / jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
        return -jnp.einsum("bksh,bkh->bks", unit, anchor)

    def directions(self, kv: LayerKV) -> tuple[Float[Array, "B K S H"], Float[Array, "B K H"]]:
        """The live keys in unit length, and their mean."""
        k = kv.k.astype(jnp.float32)
        unit = k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
        unit = jnp.where(kv.live[..., None], unit, 0.0)
        return unit, unit.sum(2) / jnp.maximum(kv.num_live, 1).astype(jnp.float32)[..., None]


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(Score):
    r"""Attention that queries to come are expected to pay, times the value's norm (arXiv 2510.00636).

    With Gaussian queries of mean $\mu$ and covariance $\Sigma$ the expected weight of a key is proportional to
    $\exp(k\cdot\mu/\sqrt d + k^\top \Sigma k / 2d)$, normalised over the tokens that may be evicted. What the model
    adds to a key's logits (ALiBi) stands in the exponent too.

    Attributes:
      queries: the model of queries.
      covariance: whether its second term counts.
      eps: added to the weight before it is multiplied by the norm.
    """

    queries: FutureQueries = FutureQueries()
    covariance: bool = True
    eps: float = 0.0

    def __post_init__(self):
        eps = number("[0, inf)", "what is added to weights is finite, not negative")
        settle(self, queries=a(FutureQueries), covariance=flag, eps=eps)

    @property
    def rotated_keys(self) -> bool:
        """See `Score`."""
        return True

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return False

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return (self.queries, KeyBias()) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv, stats, ctx, candidates = slots.kv, slots.stats, slots.ctx, slots.candidates
        (mean, cov), added = stats[self.queries], stats[KeyBias()]
        B, N, H = mean.shape
        K, S = kv.pos.shape[1:]
        k, bias = kv.k.astype(jnp.float32), added
        if self.covariance:
            quadratic = lambda sigma: jnp.einsum("bksh,bksh->bks", jnp.einsum("bksh,bkhj->bksj", k, sigma), k)
            by_group = jnp.moveaxis(cov.reshape(B, K, N // K, H, H), 2, 0)
            squares = jnp.moveaxis(lax.map(quadratic, by_group), 0, 2).reshape(B, N, S) / (2 * H)
            bias = squares if added is None else squares + added.astype(jnp.float32)
        # One row, the mean query, behind all that may be evicted.
        row, behind = jnp.zeros((B, 1), jnp.int32), jnp.where(candidates, 0, EMPTY)
        options: dict[str, Any] = {"bias": bias, "scale": ctx.site.head_dim**-0.5}
        (p,) = attention(mean[:, :, None], k, k, row, behind, columns=(Columns(),), **options).columns
        return (p + self.eps) * jnp.linalg.norm(kv.v.astype(jnp.float32), axis=-1)


@dataclasses.dataclass(frozen=True)
class LagRelative(Score):
    """How far a token stands out from the next partition of the text (LagKV, arXiv 2504.04704).

    Behind the sinks the text is cut into partitions of `lag` tokens. A partition's keys and values are normalised by
    the minimum and maximum of every channel in the next one; a token's score is the softmax within its partition of the
    deviation over channels, averaged over keys and values. Sinks, the last full partition and the remainder score 1. A
    text shorter than sinks and two partitions is ranked by recency.

    Attributes:
      lag: tokens of a partition.
      sinks: tokens before the first partition.
      cross_scoring: compare scores of different partitions as they are; otherwise each is replaced by its rank within
        its partition, over `lag`.
    """

    lag: int = 128
    sinks: int = 4
    cross_scoring: bool = False

    @property
    def rotated_keys(self) -> bool:
        """See `Score`."""
        return True

    def __post_init__(self):
        settle(
            self,
            lag=tokens(1, "a partition has at least one token"),
            sinks=tokens(0, "a number of tokens is whole and cannot be negative"),
            cross_scoring=flag,
        )

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv = slots.kv
        S = kv.num_slots
        lag, sinks = min(self.lag, S + 1), min(self.sinks, S)  # larger ones mean no more
        num_dead = S - kv.num_live[..., None]
        order = position_order(kv.pos)
        rank = jnp.arange(S, dtype=jnp.int32)[None, None]
        first_live = (rank + num_dead) % S
        order = jnp.take_along_axis(order, first_live, axis=-1)  # oldest first, dead slots last
        live = kv.num_live[..., None]
        num = max((S - sinks) // lag, 0)  # partitions, if every slot were live
        ramp = jnp.where(rank < sinks, 1.0, rank.astype(jnp.float32) / jnp.maximum(live, 1).astype(jnp.float32))
        scores = jnp.ones((*kv.pos.shape[:2], S), jnp.float32)
        if num > 1:
            own = (self._partitions(kv.k, order, num) + self._partitions(kv.v, order, num)) / 2
            if not self.cross_scoring:
                own = jnp.argsort(jnp.argsort(own, axis=-1), axis=-1).astype(jnp.float32) / lag
            scores = scores.at[..., sinks : sinks + (num - 1) * lag].set(own.reshape(*own.shape[:2], -1))
        full = (live - self.sinks) // lag  # partitions that are complete
        scores = jnp.where(rank >= sinks + (full - 1) * lag, 1.0, scores)
        scores = jnp.where(live < sinks + 2 * lag, ramp, scores)
        return jnp.put_along_axis(jnp.zeros_like(scores), order, scores, axis=-1, inplace=False)

    def _partitions(self, x: Float[Array, "B K S H"], order, num: int) -> Float[Array, "B K P lag"]:
        """Softmax within each partition but the last of the deviation relative to the next one."""
        index = order[..., self.sinks : self.sinks + num * self.lag, None]
        x = jnp.take_along_axis(x.astype(jnp.float32), index, axis=2)
        x = x.reshape(*x.shape[:2], num, self.lag, x.shape[-1])
        low, high = x.min(3, keepdims=True), x.max(3, keepdims=True)
        spread = jnp.maximum(high - low, 1e-12)
        relative = (x[:, :, :-1] - low[:, :, 1:]) / spread[:, :, 1:]
        deviation = jnp.std(relative, axis=-1, ddof=1)
        e = jnp.exp(deviation - deviation.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
