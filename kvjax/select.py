"""Which slots survive, given a score for each and a budget for every head."""

import abc
import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.state import EMPTY, position_order

Ties = Literal["evict_older", "lower_index"]

_ONE_BY_ONE = 4  # up to this many evictions a head, finding the worst repeatedly beats sorting


class Select(abc.ABC):
    """A frozen dataclass that turns scores and budgets into a keep mask."""

    @abc.abstractmethod
    def __call__(
        self,
        score: Float[Array, "B K S"],
        pos: Int[Array, "B K S"],
        budgets: Int[Array, "B K"],
        *,
        cap: int,
        most: int | None,
    ) -> Bool[Array, "B K S"]:
        """The slots to keep.

        Args:
          score: +inf for protected slots. Dead slots are ignored.
          pos: positions, EMPTY for dead slots.
          budgets: how many live slots every head may keep.
          cap: an upper bound of `budgets` (static).
          most: an upper bound of the evictions in one head (static), None if unknown.
        """


@dataclasses.dataclass(frozen=True)
class TopK(Select):
    """Keeps the highest scores.

    Attributes:
      ties: among equal scores, "evict_older" keeps the larger position, as every first-index argmin over a cache in
        order does; "lower_index" keeps the smaller one, as `jax.lax.top_k` does.
    """

    ties: Ties = "evict_older"

    def __post_init__(self):
        if self.ties not in ("evict_older", "lower_index"):
            raise ValueError(f"TopK(ties={self.ties!r}): not one of ('evict_older', 'lower_index')")

    def __call__(
        self,
        score: Float[Array, "B K S"],
        pos: Int[Array, "B K S"],
        budgets: Int[Array, "B K"],
        *,
        cap: int,
        most: int | None,
    ) -> Bool[Array, "B K S"]:
        """See `Select`."""
        if most is not None and most <= _ONE_BY_ONE:
            return self._drop(score, pos, budgets, most)
        S = pos.shape[-1]
        order = position_order(pos)
        if self.ties == "evict_older":
            order = order[..., ::-1]  # newest first: top_k prefers the lower index among equals
        live = jnp.take_along_axis(pos, order, axis=-1) != EMPTY
        best = jnp.where(live, jnp.take_along_axis(score, order, axis=-1), -jnp.inf)
        size = min(cap, S)
        _, index = lax.top_k(best, size)
        chosen = jnp.arange(size, dtype=jnp.int32)[None, None] < budgets[..., None]
        keep = jnp.put_along_axis(
            jnp.zeros(pos.shape, bool), jnp.take_along_axis(order, index, axis=-1), chosen, axis=-1, inplace=False
        )
        return keep & (pos != EMPTY)

    def _drop(self, score, pos, budgets, most):
        """Removes the worst slot of every head, up to `most` times."""
        keep = pos != EMPTY
        excess = keep.sum(-1, dtype=jnp.int32) - budgets
        age = pos if self.ties == "evict_older" else -pos
        for i in range(most):
            alive = jnp.where(keep, score, jnp.inf)
            worst = keep & (alive == alive.min(-1, keepdims=True))
            first = jnp.where(worst, age, jnp.iinfo(age.dtype).max).min(-1, keepdims=True)
            keep = keep & ~(worst & (age == first) & (i < excess)[..., None])
        return keep
