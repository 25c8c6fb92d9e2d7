"""PyramidKV (Cai et al., arXiv 2406.02069)."""

import dataclasses
from typing import Literal

from kvjax.allocation import Pyramid
from kvjax.budget import Count
from kvjax.eviction import Evict
from kvjax.methods.snapkv import snapkv


def pyramidkv(
    budget: int | float | Count,
    *,
    beta: float = 20.0,
    window_size: int = 8,
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    group: Literal["mean", "max", "sum"] = "mean",
) -> Evict:
    """SnapKV with budgets that fall linearly from the first layer to the last.

    See `kvjax.allocation.Pyramid` for the progression. The window comes on top of each layer's share (D-43 is the
    opposite reading), and the model's total is exactly that of a uniform `budget`.

    Args:
      budget: live tokens a kv head and layer on average, window included.
      beta: steepness of the pyramid; 1 is SnapKV.
      window_size: observation window (the paper's alpha, 8).
      kernel_size, pooling, group: see `snapkv`.
    """
    policy = snapkv(budget, window_size=window_size, kernel_size=kernel_size, pooling=pooling, group=group)
    return dataclasses.replace(policy, layers=Pyramid(beta))
