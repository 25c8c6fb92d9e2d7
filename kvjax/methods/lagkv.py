"""LagKV (Liang et al., arXiv 2504.04704)."""

from kvjax.budget import Count
from kvjax.eviction import Evict
from kvjax.key_scores import LagRelative


def lagkv(budget: int | float | Count, *, lag: int = 128, sinks: int = 4, cross_scoring: bool = False) -> Evict:
    """Keeps tokens that stand out from the partition of text that follows them.

    See `kvjax.key_scores.LagRelative`. Attention is not looked at. Sinks and the last partition score highest.

    Args:
      budget: live tokens a kv head and layer.
      lag: tokens of a partition.
      sinks: first tokens, which belong to no partition.
      cross_scoring: compare scores of different partitions as they are.
    """
    return Evict(LagRelative(lag, sinks, cross_scoring), budget)
