"""CurDKV (Sengupta et al., arXiv 2509.15038)."""

from typing import Literal

from kvjax.eviction import Evict
from kvjax.scoring.key_scores import SquaredNorms
from kvjax.scoring.protect import Protect
from kvjax.sizes.budget import Count


def curdkv(
    budget: int | float | Count,
    *,
    of: Literal["product", "mean", "key", "value"] = "product",
    partition: int | None = 16,
    sinks: int = 4,
) -> Evict:
    r"""Keeps the tokens that a CUR decomposition of the cache would: those with high leverage in keys and values.

    $S_j = \frac{\lVert k_j\rVert^2}{\sum_P \lVert k\rVert^2} \cdot \frac{\lVert v_j\rVert^2}{\sum_P \lVert v\rVert^2}$
    with $P$ the partition of 16 tokens that holds $j$, over the sum of all tokens, as kvpress has it (`CURPress`).
    Attention is not looked at. Its random projection of keys and values before their norms are taken
    (`use_random_leverage`), which estimates the same norms, is left out.

    Args:
      budget: live tokens a kv head and layer, sinks included. A prompt whose share cannot hold the sinks is kept whole.
      of: the product of both shares, their mean, or those of keys or values alone.
      partition: tokens of a partition; None for none: squared norms as they are, not shares.
      sinks: protected first tokens.
    """
    return Evict(SquaredNorms(of, partition), budget, protect=Protect(sinks=sinks))
