"""Ada-Pyramid: adaptive head budgets on PyramidKV (Feng et al., arXiv 2407.11550)."""

import dataclasses
from typing import Literal

from kvjax.eviction import Evict
from kvjax.methods.pyramidkv import Preset, pyramidkv
from kvjax.policy import Granularity, Layout
from kvjax.sizes.allocation import Adaptive
from kvjax.sizes.budget import Count


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
    normalize: bool = False,
    safeguard: Literal["blend", "floor_then_global"] = "blend",
    rounding: Literal["largest_remainder", "half_even"] = "largest_remainder",
    skip_layers: int = 0,
    pool_before_rows: bool = False,
    softmax_over: Literal["all", "outside_window"] = "all",
    granularity: Granularity = "kv_head",
    cut_window: bool = False,
    preset: Preset | None = None,
) -> Evict:
    """PyramidKV where the heads of a layer compete for its budget.

    The released class computes the pyramid from the first prompt it sees and keeps it for later ones (D-25); here every
    prompt has its own. `preset="pyramid_adakv"` is that class's progression.

    Args:
      budget: live tokens a kv head and layer on average, window included.
      alpha, max_ratio, storage, normalize, safeguard, rounding, skip_layers: see `ada_snapkv`.
      beta, preset: see `pyramidkv`.
      window_size, kernel_size, pooling, group, pool_before_rows, softmax_over, granularity, cut_window: see
        `snapkv`.

    Raises:
      ValueError: what `Adaptive` or `pyramidkv` refuse.
    """
    policy = pyramidkv(
        budget,
        beta=beta,
        window_size=window_size,
        kernel_size=kernel_size,
        pooling=pooling,
        group=group,
        pool_before_rows=pool_before_rows,
        softmax_over=softmax_over,
        granularity=granularity,
        cut_window=cut_window,
        preset=preset,
    )
    heads = Adaptive(alpha, max_ratio, normalize, safeguard, rounding, skip_layers)
    return dataclasses.replace(policy, heads=heads, storage=storage)
