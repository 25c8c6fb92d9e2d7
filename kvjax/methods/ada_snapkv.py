"""Ada-SnapKV: adaptive head budgets on SnapKV's scores (Feng et al., arXiv 2407.11550)."""

import dataclasses
from typing import Literal

from kvjax.allocation import Adaptive
from kvjax.budget import Count
from kvjax.eviction import Evict
from kvjax.methods.snapkv import snapkv
from kvjax.policy import Layout


def ada_snapkv(
    budget: int | float | Count,
    *,
    alpha: float = 0.5,
    window_size: int = 32,
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    group: Literal["mean", "max", "sum"] = "mean",
    max_ratio: float = float("inf"),
    storage: Layout = "pool",
) -> Evict:
    """SnapKV where the heads of a layer compete for its budget.

    The layer's largest window scores are found across heads; each head gets as many tokens as it won, blended with the
    uniform share (`kvjax.allocation.Adaptive`), then keeps its own best. The layer's total is that of SnapKV.

    Like the released code, scores are row means under a softmax over all keys, reduced over the group, then pooled. The
    paper pools before averaging rows (D-23) and normalises over the keys outside the window (D-24).

    Args:
      budget: live tokens a kv head and layer on average, window included.
      alpha: weight of the adaptive share; `1 - floor_alpha` of the released code (D-20).
      window_size, kernel_size, pooling, group: see `snapkv`.
      max_ratio: no head gets more than this many times the average.
      storage: "pool" allocates the layer what its heads need together; "dense" gives every head the slots that the
        largest could need, which `max_ratio` bounds.
    """
    policy = snapkv(budget, window_size=window_size, kernel_size=kernel_size, pooling=pooling, group=group)
    return dataclasses.replace(policy, heads=Adaptive(alpha, max_ratio), storage=storage)
