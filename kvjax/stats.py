"""What a policy asks to see of the attention matrix, and what it is given."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from jaxtyping import Array, Float

from kvjax.context import Phase
from pallas_kernels import Columns
from pallas_kernels.pytree import pytree, static


@dataclasses.dataclass(frozen=True)
class AllRows:
    """Every query row just computed: the whole prompt, or the one row of a decode step."""


@dataclasses.dataclass(frozen=True)
class LastRows:
    """The last `n` tokens of every sequence among the query rows just computed."""

    n: int

    def __post_init__(self):
        if self.n < 1:
            raise ValueError(f"LastRows(n={self.n}): at least one row must be observed")


@dataclasses.dataclass(frozen=True)
class Observe:
    """One column statistic: for every key, the sum over `rows` of an element function of the attention probability.

    Attributes:
      rows: which query rows count. Padding rows never do.
      element: "p", "p2" (squared) or "above" (counts of `p > threshold`, strict).
      threshold: for "above": a number, "1/visible" or "1/position".
      group: how the query heads of a kv head become one: "mean", "max", "sum"; None asks for every query head.
      group_at: "before" or "after" the element function and the row sum. They differ for squares,
        thresholds and max; None means "before" for squares and thresholds, "after" for the rest.
    """

    rows: AllRows | LastRows = AllRows()
    element: Literal["p", "p2", "above"] = "p"
    threshold: float | str = "1/visible"
    group: Literal["mean", "max", "sum"] | None = "mean"
    group_at: Literal["before", "after"] | None = None

    def __post_init__(self):
        self.columns(1)  # raises what the kernels would raise

    def columns(self, num_rows: int) -> Columns:
        """The kernel request for `num_rows` query rows."""
        rows = min(self.rows.n, num_rows) if isinstance(self.rows, LastRows) else None
        linear = self.element == "p" or self.group is None
        at = ("after" if linear else "before") if self.group_at is None else self.group_at
        return Columns(rows, self.element, self.threshold, self.group, at)


@pytree
class LayerStats:
    """The statistics of one layer, indexed by what was asked: `stats[Observe(...)]`."""

    values: tuple[Float[Array, "B _ S"], ...] = ()
    observed: tuple[Observe, ...] = static(default=())

    def __getitem__(self, observe: Observe) -> Float[Array, "B _ S"]:
        if observe not in self.observed:
            raise ValueError(
                f"{observe} was not measured; the model measured {list(self.observed) or 'nothing'}. "
                "A score must list in observe(phase) all it reads"
            )
        return self.values[self.observed.index(observe)]


@pytree
class AttentionStats:
    """The statistics of all layers, and the phase they were measured in."""

    layers: tuple[LayerStats, ...]
    phase: Phase = static()


def ordered(observes: Iterable[Observe]) -> tuple[Observe, ...]:
    """Requests without duplicates, in an order that does not depend on hashing."""
    return tuple(sorted(set(observes), key=repr))
