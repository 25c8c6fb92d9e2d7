"""HeadKV (Fu et al., arXiv 2410.19258)."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax.eviction import Evict
from kvjax.methods.snapkv import snapkv
from kvjax.pallas_kernels.values import check_array, checked, each, number
from kvjax.policy import Layout
from kvjax.sizes.allocation import HeadTable, LayerTable
from kvjax.sizes.budget import Count


def headkv(
    budget: int | float | Count,
    importance: Sequence[Sequence[float]] | np.ndarray,
    *,
    beta: float = 1.2,
    window_size: int = 32,
    kernel_size: int = 7,
    storage: Layout = "pool",
) -> Evict:
    r"""SnapKV, where heads that retrieve and reason get more.

    Beside the window, every head has $b - b / \beta$ tokens of its own, and what all heads have given up, $L K b /
    \beta$, is divided in proportion to their importance, which is found once for a model
    (`kvjax.learning.probes.head_importance`). The released code has sets for query heads, rounds every head's share for
    itself and lets heads have more tokens than there are; here the model's total is exact, and what a head cannot use
    goes to the others. Of every query head it keeps the same tokens up to that (`kvjax/methods/peers.md`).

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      importance: "L K", one number for every kv head; only ratios matter.
      beta: $\beta$, from 1, where all tokens go by importance; large values are SnapKV.
      window_size, kernel_size: see `snapkv`.
      storage: "pool" allocates a layer what its heads need together, "dense" every head what the largest has.

    Raises:
      ValueError: importances that are negative, all 0, or of different numbers of heads.
    """
    beta = checked(number("[1, inf)", "heads cannot give up more than they have (1)"), "beta", beta)
    share = number("[0, inf)", "an importance is finite, not negative")
    if isinstance(importance, np.ndarray):
        check_array(
            "importance", importance * 1.0 if importance.dtype.kind in "iu" else importance, "layers", "kv heads"
        )
    rows = checked(each(each(share, least=1), least=1), "importance", importance)
    if len({len(row) for row in rows}) > 1 or not sum(map(sum, rows)) > 0:
        raise ValueError(
            f"importance has rows of {sorted({len(row) for row in rows})} heads and a sum of {sum(map(sum, rows))}; "
            "give one number a kv head in every layer, one at least above 0"
        )
    weights = np.asarray(rows) / np.mean(rows) / beta + 1 - 1 / beta
    layers, heads = LayerTable(weights.sum(1)), HeadTable(np.maximum(weights, np.finfo(float).tiny))
    policy = snapkv(budget, window_size=window_size, kernel_size=kernel_size)
    return dataclasses.replace(policy, layers=layers, heads=heads, storage=storage)
