"""How a budget is divided: over the layers of a model, and over the kv heads of a layer."""

import abc
import dataclasses
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.context import Site


def apportion(shares: Any, limit: Any, xp: ModuleType = np) -> Any:
    """Whole numbers near real `shares` along the last axis, with the same total and none above `limit`.

    What exceeds a limit goes to the others in proportion; then largest remainders are rounded up, ties to the lower
    index. A total beyond the sum of the limits is cut to it.

    Args:
      shares: "... M" non-negative floats whose sum is a whole number.
      limit: "... M" whole numbers, or broadcastable to it.
      xp: numpy on the host, jax.numpy under jit.

    Returns:
      "... M" integers of 32 bits.
    """
    limit = xp.broadcast_to(limit, shares.shape).astype(shares.dtype)
    total = xp.minimum(xp.round(shares.sum(-1, keepdims=True)), limit.sum(-1, keepdims=True))

    def spread(shares):
        surplus = xp.maximum(shares - limit, 0).sum(-1, keepdims=True)
        shares = xp.minimum(shares, limit)
        room = limit - shares
        weight = xp.where(room > 0, shares, xp.zeros_like(shares))
        weight = xp.where(weight.sum(-1, keepdims=True) > 0, weight, room)
        mass = weight.sum(-1, keepdims=True)
        return shares + surplus * weight / xp.where(mass > 0, mass, xp.ones_like(mass))

    if xp is np:
        for _ in range(shares.shape[-1]):
            if (shares <= limit).all():
                break
            shares = spread(shares)
    else:
        shares = lax.fori_loop(0, shares.shape[-1], lambda _, s: spread(s), shares)
    shares = xp.minimum(shares, limit)

    floors = xp.floor(shares)
    remainder = xp.where(floors < limit, shares - floors, -xp.ones_like(shares))
    order = xp.argsort(-remainder, axis=-1, stable=True)
    rank = xp.argsort(order, axis=-1, stable=True)
    missing = (total - floors.sum(-1, keepdims=True)).astype(rank.dtype)
    return floors.astype(np.int32) + (rank < missing).astype(np.int32)


class LayerAllocation(abc.ABC):
    """A frozen dataclass that divides an average budget over layers."""

    @abc.abstractmethod
    def layers(self, average: np.ndarray, limit: np.ndarray, num_layers: int) -> np.ndarray:
        """Selectable tokens of every layer.

        Args:
          average: "M" selectable tokens a layer, on average, one entry for every prompt length considered.
          limit: "M" the most that a layer can use: what exists, and never less than `average`.
          num_layers: layers of the model.

        Returns:
          "M L" whole numbers.
        """


@dataclasses.dataclass(frozen=True)
class UniformLayers(LayerAllocation):
    """Every layer gets the average."""

    def layers(self, average: np.ndarray, limit: np.ndarray, num_layers: int) -> np.ndarray:
        """See `LayerAllocation`."""
        del limit
        return np.repeat(average[:, None], num_layers, axis=1)


@dataclasses.dataclass(frozen=True)
class Pyramid(LayerAllocation):
    """Budgets that fall linearly from the first layer to the last (PyramidKV, arXiv 2406.02069).

    With `b` the average, the last layer gets `b / beta`, the first `2 b - b / beta`. No layer gets more than exists;
    what it would have had in excess goes to the others in proportion, and largest remainders make the total exact,
    where the released code overspends by its integer step (D-41) and switches formulas for short prompts (D-42).

    Attributes:
      beta: steepness; 1 is uniform.
    """

    beta: float = 20.0

    def __post_init__(self):
        if self.beta < 1:
            raise ValueError(f"Pyramid(beta={self.beta}): beta must be at least 1 (uniform); larger is steeper")

    def layers(self, average: np.ndarray, limit: np.ndarray, num_layers: int) -> np.ndarray:
        """See `LayerAllocation`."""
        b = average[:, None].astype(np.float64)
        fraction = np.arange(num_layers) / max(num_layers - 1, 1)
        last = b / self.beta
        first = 2 * b - last
        shares = first - (first - last) * fraction if num_layers > 1 else b
        return apportion(shares, limit[:, None])


class HeadAllocation(abc.ABC):
    """A frozen dataclass that divides a layer's budget over its kv heads."""

    @abc.abstractmethod
    def cap(self, average: np.ndarray, limit: np.ndarray, num_kv_heads: int) -> np.ndarray:
        """The most selectable tokens that one head can get, for every prompt length (host, static)."""

    def total(self, average: np.ndarray, num_kv_heads: int) -> np.ndarray:
        """The most tokens that all heads together can get (host, static)."""
        return average * num_kv_heads

    @abc.abstractmethod
    def heads(
        self,
        score: Float[Array, "B K S"],
        candidates: Bool[Array, "B K S"],
        average: Int[Array, "B"],
        most: int,
        site: Site,
    ) -> Int[Array, "B K"]:
        """Selectable tokens of every head.

        Args:
          score: larger is more worth keeping.
          candidates: the tokens that compete: live and not protected.
          average: selectable tokens a head.
          most: an upper bound of `average` (static).
          site: which layer.
        """


@dataclasses.dataclass(frozen=True)
class UniformHeads(HeadAllocation):
    """Every head gets the average."""

    def cap(self, average: np.ndarray, limit: np.ndarray, num_kv_heads: int) -> np.ndarray:
        """See `HeadAllocation`."""
        del limit, num_kv_heads
        return average

    def heads(
        self,
        score: Float[Array, "B K S"],
        candidates: Bool[Array, "B K S"],
        average: Int[Array, "B"],
        most: int,
        site: Site,
    ) -> Int[Array, "B K"]:
        """See `HeadAllocation`."""
        del candidates, most, site
        return jnp.broadcast_to(average[:, None], score.shape[:2])


@dataclasses.dataclass(frozen=True)
class Adaptive(HeadAllocation):
    """Heads compete for the layer's budget (Ada-KV, arXiv 2407.11550, Algorithm 1).

    The largest `K * average` scores of the layer are found across heads; a head's share is how many of them are its
    own, blended with the uniform share: `alpha * own + (1 - alpha) * average`. Largest remainders keep the layer's
    total exact, where the released code rounds every head half-to-even and drifts (D-21).

    Attributes:
      alpha: weight of the adaptive part, the paper's alpha. The released code's `floor_alpha` weights the uniform part:
        `alpha = 1 - floor_alpha` (D-20). 0 is uniform.
      max_ratio: no head gets more than `max_ratio` times the average; the surplus goes to the others in proportion.
        Static shapes need some bound. inf leaves it to the number of candidates.
    """

    alpha: float = 0.5
    max_ratio: float = 4.0

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"Adaptive(alpha={self.alpha}): alpha must lie in [0, 1]")
        if self.max_ratio < 1:
            raise ValueError(f"Adaptive(max_ratio={self.max_ratio}): heads cannot all get less than the average (1)")

    def cap(self, average: np.ndarray, limit: np.ndarray, num_kv_heads: int) -> np.ndarray:
        """See `HeadAllocation`."""
        all_in_one = average * (1 - self.alpha + self.alpha * num_kv_heads)
        cap = np.ceil(np.minimum(all_in_one, self.max_ratio * average) - 1e-9)
        return np.minimum(cap, np.maximum(limit, average)).astype(np.int64)

    def heads(
        self,
        score: Float[Array, "B K S"],
        candidates: Bool[Array, "B K S"],
        average: Int[Array, "B"],
        most: int,
        site: Site,
    ) -> Int[Array, "B K"]:
        """See `HeadAllocation`."""
        del site
        B, K, S = score.shape
        flat = jnp.where(candidates, score, -jnp.inf).reshape(B, K * S)
        size = min(K * most, K * S)
        best, index = lax.top_k(flat, size)
        won = (jnp.arange(size, dtype=jnp.int32)[None] < (K * average)[:, None]) & (best > -jnp.inf)
        head = (index // S)[..., None] == jnp.arange(K, dtype=jnp.int32)[None, None]
        own = (head & won[..., None]).sum(1, dtype=jnp.int32)
        mean = average[:, None].astype(jnp.float32)
        shares = self.alpha * own.astype(jnp.float32) + (1.0 - self.alpha) * mean
        # Where the budget holds every candidate, nothing is taken from any head, and what is left over is shared.
        count = candidates.sum(-1).astype(jnp.float32)
        shares = jnp.where(count.mean(-1, keepdims=True) <= mean, count, shares)
        shares = shares + (mean - shares.mean(-1, keepdims=True))
        limit = jnp.maximum(count, mean)
        return apportion(shares, jnp.minimum(limit, jnp.ceil(self.max_ratio * mean - 1e-3)), jnp)
