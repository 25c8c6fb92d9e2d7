"""Ada-SnapKV: adaptive head budgets on SnapKV's scores (Feng et al., arXiv 2407.11550)."""

import dataclasses
from typing import Literal

from kvjax.eviction import Evict
from kvjax.methods.snapkv import snapkv
from kvjax.policy import Granularity, Layout
from kvjax.sizes.allocation import Adaptive
from kvjax.sizes.budget import Count


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
    normalize: bool = False,
    safeguard: Literal["blend", "floor_then_global"] = "blend",
    rounding: Literal["largest_remainder", "half_even"] = "largest_remainder",
    skip_layers: int = 0,
    pool_before_rows: bool = False,
    softmax_over: Literal["all", "outside_window"] = "all",
    granularity: Granularity = "kv_head",
    cut_window: bool = False,
) -> Evict:
    """SnapKV where the heads of a layer compete for its budget.

    The layer's largest window scores are found across heads; each head gets as many tokens as it won, blended with the
    uniform share (`kvjax.sizes.allocation.Adaptive`), then keeps its own best. The layer's total is that of SnapKV.

    Like the released code, scores are row means under a softmax over all keys, reduced over the group, then pooled. The
    paper pools before averaging rows (`pool_before_rows=True`, D-23) and normalises over the keys outside the window
    (`softmax_over="outside_window"`, D-24). Other disagreements, and who is on the other side:

    | option | whose |
    |---|---|
    | `rounding="half_even", max_ratio=math.inf` | the released code, whose layer totals drift (D-21) |
    | `alpha=0.8` | its command line and its runs with grouped queries (`floor_alpha` 0.2, D-20) |
    | `granularity="query_head"` | its runs without `gqa_support`: a set for every query head |
    | `normalize=True` | KVCache-Factory (D-26) |
    | `safeguard="floor_then_global", alpha=0.2` | kvpress (D-22) |

    Args:
      budget: live tokens a kv head and layer on average, window included.
      alpha: weight of the adaptive share; `1 - floor_alpha` of the released code (D-20).
      window_size, kernel_size, pooling, group, pool_before_rows, softmax_over, granularity, cut_window: see
        `snapkv`.
      max_ratio: no head gets more than this many times the average.
      storage: "pool" allocates the layer what its heads need together; "dense" gives every head the slots that the
        largest could need, which `max_ratio` bounds.
      normalize: scale every head's scores by the share that its best hold, before heads compete.
      safeguard, rounding, skip_layers: see `Adaptive`.

    Raises:
      ValueError: what `Adaptive` or `snapkv` refuse.
    """
    policy = snapkv(
        budget,
        window_size=window_size,
        kernel_size=kernel_size,
        pooling=pooling,
        group=group,
        pool_before_rows=pool_before_rows,
        softmax_over=softmax_over,
        granularity=granularity,
        cut_window=cut_window,
    )
    heads = Adaptive(alpha, max_ratio, normalize, safeguard, rounding, skip_layers)
    return dataclasses.replace(policy, heads=heads, storage=storage)
