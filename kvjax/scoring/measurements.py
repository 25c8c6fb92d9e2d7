"""What policies look at besides attention probabilities: queries, and what values contribute to the output."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax.cache.state import EMPTY
from kvjax.scoring.stats import Measurement, Moment
from pallas_kernels.values import settle, tokens, whole

_MOST_AHEAD = 2**20  # positions, which take seconds


@dataclasses.dataclass(frozen=True)
class FutureQueries(Measurement):
    """A Gaussian model of the queries to come (ExpectedAttention, arXiv 2510.00636, section 3).

    The mean and the (biased) covariance of the new tokens' queries before rotation, both rotated by the average of the
    rotations at the next `horizon` positions: (mean "B N H", covariance "B N H H").

    Attributes:
      horizon: how many positions ahead.
      skip: queries at the first positions do not count; sinks have queries of their own kind.
    """

    horizon: int = 512
    skip: int = 4

    def __post_init__(self):
        ahead = f"at least one position lies ahead, and no more than {_MOST_AHEAD:,} are averaged one by one"
        settle(self, horizon=whole(1, _MOST_AHEAD, ahead), skip=tokens())

    def measure(self, moment: Moment) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
        """See `Measurement`."""
        q = moment.raw_q.astype(jnp.float32)
        B, _, _, H = q.shape
        counts = moment.pos >= self.skip
        counts = jnp.where(counts.any(-1, keepdims=True), counts, moment.pos != EMPTY).astype(jnp.float32)
        total = jnp.maximum(counts.sum(-1), 1.0)[:, None, None]
        mean = jnp.einsum("bt,bnth->bnh", counts, q) / total
        centred = q - mean[:, :, None]
        cov = jnp.einsum("bt,bnth,bntj->bnhj", counts, centred, centred) / total[..., None]

        basis = jnp.broadcast_to(jnp.eye(H, dtype=q.dtype)[None, None], (B, 1, H, H))  # one row a basis vector

        def add(ahead, total):
            pos = jnp.broadcast_to((moment.ctx.length + ahead)[:, None, None], (B, 1, H))
            return total + moment.rotate(basis, pos)

        turned = lax.fori_loop(0, self.horizon, add, jnp.zeros_like(basis))[:, 0] / self.horizon  # row j: R e_j
        mean = jnp.einsum("bnj,bjh->bnh", mean, turned)
        return mean, jnp.einsum("bnij,bih,bjl->bnhl", cov, turned, turned)


@dataclasses.dataclass(frozen=True)
class KeyBias(Measurement):
    """What the model adds to the logits of every key: "B N S", or None where that is nothing.

    How far ahead a row lies takes the same from the logits of all keys (`cache.state.linear_bias`), so that rows to
    come need no average.
    """

    def measure(self, moment: Moment) -> Float[Array, "B N S"] | None:
        """See `Measurement`."""
        return moment.bias


@dataclasses.dataclass(frozen=True)
class QuerySquares(Measurement):
    """Mean square of every channel of the last `rows` rotated queries, averaged over a group: "B K H" (ThinK).

    Attributes:
      rows: how many of the new tokens count.
    """

    rows: int = 32

    def __post_init__(self):
        settle(self, rows=tokens(1, "at least one row must be observed"))

    def measure(self, moment: Moment) -> Float[Array, "B K H"]:
        """See `Measurement`."""
        rows = min(self.rows, moment.pos.shape[1])
        q = moment.q[:, :, -rows:].astype(jnp.float32)
        B, N, _, H = q.shape
        counts = (moment.pos[:, -rows:] != EMPTY).astype(jnp.float32)
        total = jnp.maximum(counts.sum(-1), 1.0)[:, None, None]
        mean = jnp.einsum("bt,bnth->bnh", counts, q * q) / total
        K = moment.kv.pos.shape[1]
        return mean.reshape(B, K, N // K, H).mean(2)


@dataclasses.dataclass(frozen=True)
class ProjectedValueNorm(Measurement):
    """L1 norm of every value after the output projection, averaged over a group: "B K S" (CriticalKV)."""

    def measure(self, moment: Moment) -> Float[Array, "B K S"]:
        """See `Measurement`."""
        if moment.out_proj is None:
            raise ValueError(
                "projected value norms need the layer's output projection; pass out_proj= of shape (N, H, D)"
            )
        v = moment.kv.v
        K = v.shape[1]
        N = moment.out_proj.shape[0]
        weights = moment.out_proj.reshape(K, N // K, *moment.out_proj.shape[1:]).swapaxes(0, 1)

        def one(w: Float[Array, "K H D"]) -> Float[Array, "B K S"]:
            by_head = lambda args: jnp.abs(jnp.einsum("bsh,hd->bsd", *args)).sum(-1).astype(jnp.float32)
            return lax.map(by_head, (v.swapaxes(0, 1), w.astype(v.dtype))).swapaxes(0, 1)

        return jax.lax.map(one, weights).mean(0)
