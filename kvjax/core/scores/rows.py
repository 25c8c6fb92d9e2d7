"""Scores that look at the prompt's last rows one by one, where their sum does not say enough."""

import jax.numpy as jnp
import numpy as np

from kvjax.core.contract import Count, count, resolve
from kvjax.core.observe import ProjectedValueNorm, by_row, votes
from kvjax.core.scores.attention import Score, layer_mean, pool_in_order


def mean_and_variance(rows, exist):
    """Over the rows that exist, "B K G S" each; the variance of a sample."""
    n = jnp.maximum(exist.sum(3), 1).astype(jnp.float32)
    mean = rows.sum(3) / n
    square = jnp.where(exist, jnp.square(rows - mean[:, :, :, None]), 0.0).sum(3)
    return mean, square / jnp.maximum(n - 1, 1)


class Unsteady(Score):
    """What the last rows give a token: the mean, plus a multiple of the variance (CAKE)."""

    rows: int = 32
    variance: float = 200.0

    def observe(self, phase):
        return (votes(self.rows),) if phase == "prefill" else ()

    def __call__(self, slots):
        mean, variance = mean_and_variance(*by_row(votes(self.rows), slots))
        return (mean + self.variance * variance).mean(2)


class Defensive(Score):
    """The most that any row gives a token, never less than the mean, times its value's weight (DefensiveKV)."""

    most: Count = count()
    rows: int = 32
    kernel: int = 5
    mass: float = 0.9

    def observe(self, phase):
        return (votes(self.rows), ProjectedValueNorm()) if phase == "prefill" else ()

    def hparams(self, info, lengths, budget):
        most = np.maximum(resolve(self.most, lengths, budget) - self.rows, 0)
        return jnp.asarray(np.minimum(most, lengths), jnp.int32)

    def __call__(self, slots):
        kv, among = slots.kv, slots.candidates
        rows, exist = by_row(votes(self.rows), slots)
        B, K, G, R, S = rows.shape
        rows = jnp.where(among[:, :, None, None], rows, 0.0)
        wide = lambda x: jnp.repeat(x, G * R, axis=1)
        pooled = pool_in_order(rows.reshape(B, -1, S), wide(kv.pos), wide(among), "avg", self.kernel).reshape(
            rows.shape
        )
        pooled = jnp.where(among[:, :, None, None], pooled, 0.0)
        now = pooled.sum(-1, keepdims=True)
        worst = (pooled * rows.sum(-1, keepdims=True) / jnp.where(now > 0, now, 1.0)).max((2, 3))
        n = jnp.maximum(among.sum(-1, keepdims=True), 1)
        risk = jnp.maximum(worst, jnp.where(among, worst, 0.0).sum(-1, keepdims=True) / n)
        norm = jnp.where(among, slots.stats[ProjectedValueNorm()], 0.0)
        total = K * layer_mean(norm, kv.pos)
        score = risk * norm / jnp.where(total > 0, total, 1.0)
        mean = rows.sum(3).mean(2) / jnp.maximum(exist.sum(3), 1).astype(jnp.float32)[..., 0]
        last = among & (kv.pos >= (slots.ctx.length - 2 * self.rows)[:, None, None])
        beside = jnp.where(last, mean, 0.0).sum(-1).mean(1)
        order = jnp.lexsort((-kv.pos, jnp.where(among, -mean, 1.0)), axis=-1)
        held = jnp.take_along_axis(mean, order, -1)
        whole = held.sum(-1, keepdims=True)
        share = jnp.cumsum(held, -1) / jnp.where(whole > 0, whole, 1.0)
        first = jnp.minimum((share < (self.mass - beside)[:, None, None]).sum(-1), slots.hparams[:, None])
        rank = jnp.argsort(order, axis=-1)
        return jnp.where(among & (rank < first[..., None]), score.max((1, 2), keepdims=True) + mean, score)
