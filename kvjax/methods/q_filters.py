"""Q-Filters (Godey et al., arXiv 2503.02812)."""

import numpy as np

from kvjax.eviction import Evict
from kvjax.scoring.key_scores import Filters
from kvjax.scoring.learned import FrozenArrays
from kvjax.sizes.budget import Count


def q_filters(budget: int | float | Count, filters: np.ndarray | FrozenArrays) -> Evict:
    r"""Keeps the keys that lie against the direction in which a head's queries spread.

    $S_j = -f \cdot k_j$. Queries of a head share one direction: $f$ is the first right singular vector of many of them,
    turned such that it points away from most (`kvjax.learning.probes.fit_filters` finds it for a model; others are
    published for some). Attention is not looked at, so that it runs while decoding, too: `kvjax.when(...)`.

    Args:
      budget: live tokens a kv head and layer.
      filters: "L K H", one direction for every kv head.
    """
    return Evict(Filters(filters), budget)
