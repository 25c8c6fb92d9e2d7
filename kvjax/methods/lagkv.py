"""LagKV (Liang et al., arXiv 2504.04704)."""

from kvjax.eviction import Evict
from kvjax.scoring.key_scores import LagRelative
from kvjax.scoring.protect import Protect
from kvjax.sizes.budget import Count


def lagkv(budget: int | float | Count, *, lag: int = 128, sinks: int = 4, cross_scoring: bool = False) -> Evict:
    """Keeps tokens that stand out from the partition of text that follows them.

    See `key_scores.LagRelative`. Attention is not looked at. Sinks, the last partition and what follows it share
    the highest score, of which the newest are kept where the budget does not hold them all: sinks stay because they are
    protected.

    Args:
      budget: live tokens a kv head and layer, sinks included.
      lag: tokens of a partition.
      sinks: first tokens that stay; they belong to no partition.
      cross_scoring: compare scores of different partitions as they are.
    """
    return Evict(LagRelative(lag, sinks, cross_scoring), budget, protect=Protect(sinks=sinks))
