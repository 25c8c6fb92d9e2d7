"""Which tokens a policy may not evict. Protected tokens count against the budget."""

import dataclasses

import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.budget import Count, as_count


@dataclasses.dataclass(frozen=True)
class Protect:
    """Attention sinks and a recent window.

    Where both together exceed the budget of a sequence, the newest protected tokens win; `make_plan` refuses such
    sizes before anything runs.

    Attributes:
      sinks: the first tokens of the sequence.
      recent: the last tokens of the sequence, the newest included.
    """

    sinks: int | float | Count = 0
    recent: int | float | Count = 0

    def __post_init__(self):
        as_count(self.sinks, "sinks")
        as_count(self.recent, "recent")

    def tables(self, prompt_length: np.ndarray, budget: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sinks, recent) for every prompt length."""
        sinks = as_count(self.sinks, "sinks").table(prompt_length, budget)
        return sinks, as_count(self.recent, "recent").table(prompt_length, budget)


def protected(
    pos: Int[Array, "B K S"], length: Int[Array, "B"], sinks: Int[Array, "B"], recent: Int[Array, "B"]
) -> Bool[Array, "B K S"]:
    """Live slots among the first `sinks` or the last `recent` of `length` tokens."""
    first, last = sinks[:, None, None], (length - recent)[:, None, None]
    return (pos >= 0) & ((pos < first) | (pos >= last))
