"""Ada-Pyramid: adaptive head budgets on PyramidKV (Feng et al., arXiv 2407.11550)."""

import dataclasses
from typing import Literal

from kvjax.allocation import Adaptive
from kvjax.budget import Count
from kvjax.eviction import Evict
from kvjax.methods.pyramidkv import pyramidkv
from kvjax.policy import Layout


def ada_pyramid(
    budget: int | float | Count,
    *,
    alpha: float = 0.5,
    beta: float = 20.0,
    window_size: int = 8,
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    group: Literal["mean", "max", "sum"] = "mean",
    max_ratio: float = float("inf"),
    storage: Layout = "pool",
) -> Evict:
    """PyramidKV where the heads of a layer compete for its budget.

    The released class computes the pyramid from the first prompt it sees and keeps it for later ones (D-25); here every
    prompt has its own.

    Args:
      budget: live tokens a kv head and layer on average, window included.
      alpha, max_ratio, storage: see `ada_snapkv`.
      beta, window_size, kernel_size, pooling, group: see `pyramidkv`.
    """
    policy = pyramidkv(
        budget, beta=beta, window_size=window_size, kernel_size=kernel_size, pooling=pooling, group=group
    )
    return dataclasses.replace(policy, heads=Adaptive(alpha, max_ratio), storage=storage)
