"""Key attention only (Keyformer, arXiv 2403.09054, section 2.3)."""

from typing import Literal

from kvjax.eviction import Evict
from kvjax.scoring.scores import Accumulated
from kvjax.scoring.stats import Observe
from kvjax.sizes.budget import Count
from kvjax.sizes.schedule import every_step


def key_attention(budget: int | float | Count, *, group: Literal["mean", "max", "sum"] = "mean") -> Evict:
    """H2O's score without a recent window: a negative baseline.

    The newest token competes like any other. The released code cannot run it: with `recent=0` its mask is never
    cleared (D-02).

    Args:
      budget: live tokens a kv head and layer.
      group: how a group's query heads are combined.
    """
    return Evict(Accumulated(Observe(group=group)), budget, when=every_step())
