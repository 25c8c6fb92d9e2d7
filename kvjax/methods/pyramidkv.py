"""PyramidKV (Cai et al., arXiv 2406.02069)."""

import dataclasses
from typing import Literal

from kvjax.eviction import Evict
from kvjax.methods.snapkv import snapkv
from kvjax.pallas_kernels.values import one_of
from kvjax.policy import Granularity
from kvjax.sizes.allocation import FloorPyramid, InclusivePyramid, LayerAllocation, Pyramid
from kvjax.sizes.budget import Count

Preset = Literal["pyramid_factory", "pyramid_adakv", "pyramid_kvpress"]


def pyramidkv(
    budget: int | float | Count,
    *,
    beta: float = 20.0,
    window_size: int = 8,
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    group: Literal["mean", "max", "sum"] = "mean",
    pool_before_rows: bool = False,
    softmax_over: Literal["all", "outside_window"] = "all",
    granularity: Granularity = "kv_head",
    cut_window: bool = False,
    preset: Preset | None = None,
) -> Evict:
    """SnapKV with budgets that fall linearly from the first layer to the last.

    The window comes on top of each layer's share, the model's total is exactly that of a uniform `budget`, and one
    formula holds for every prompt (`kvjax.sizes.allocation.Pyramid`). Released code differs, and `preset` follows it:

    | preset | progression | window | prompts shorter than twice the budget | total |
    |---|---|---|---|---|
    | None | real, largest remainders | on top | what layers cannot use goes to the others | exact |
    | "pyramid_factory" (KVCache-Factory) | integer step | on top | uniform | exceeds (D-41) |
    | "pyramid_adakv" (AdaKV) | integer step | on top | flatter pyramid (D-42) | exceeds |
    | "pyramid_kvpress" | real, half to even | inside (D-43) | flatter pyramid, or uniform | up to rounding |

    A preset is a way of dividing the budget; the scores' parameters stay as given. KVCache-Factory's runner and AdaKV
    use kernel 7 and "max" with windows of 8 and 32, kvpress kernel 5 and "avg" with a window of 64.

    Args:
      budget: live tokens a kv head and layer on average, window included.
      beta: steepness of the pyramid; 1 is SnapKV, up to the rounding of presets.
      window_size: observation window (the paper's alpha, 8).
      kernel_size, pooling, group, pool_before_rows, softmax_over, granularity, cut_window: see
        `snapkv`.
      preset: whose division of the budget, None for the exact one.

    Raises:
      ValueError: an unknown preset, or what `snapkv` refuses.
    """
    layers: dict[Preset | None, LayerAllocation] = {
        None: Pyramid(beta),
        "pyramid_factory": FloorPyramid(beta),
        "pyramid_adakv": FloorPyramid(beta, uniform_branch=False),
        "pyramid_kvpress": InclusivePyramid(beta),
    }
    one_of("preset", preset, *layers)
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
    return dataclasses.replace(policy, layers=layers[preset])
