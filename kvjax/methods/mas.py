"""MAS: mean attention score (RoCo's ablation, Ren and Zhu, arXiv 2402.06262, section 4.1)."""

from typing import Literal

from kvjax.eviction import Evict
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Mean
from kvjax.sizes.budget import Count
from kvjax.sizes.schedule import every_step


def mas(
    budget: int | float | Count,
    *,
    recent: int | float | Count = 0,
    sinks: int = 0,
    count_self: bool = True,
    ignore_prefix: int = 0,
    group: Literal["mean", "max", "sum"] = "mean",
) -> Evict:
    r"""Evicts the token with the smallest mean attention over the rows that could see it.

    $S_j = \mathrm{acc}_j / \mathrm{cnt}_j$. The released code counts a token's own row, the paper's wording ("future
    tokens") does not (D-10). On the prompt alone this is kvpress' observed attention.

    Args:
      budget: live tokens a kv head and layer.
      recent, sinks: last and first tokens that stay.
      count_self: whether a token's own row counts; without it the newest token is kept.
      ignore_prefix: rows of the first so many prompt tokens are neither summed nor counted (D-46).
      group: how a group's query heads are combined.
    """
    score = Mean(count_self, ignore_prefix, group)
    return Evict(score, budget, protect=Protect(sinks, recent), when=every_step())
