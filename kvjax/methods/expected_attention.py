"""ExpectedAttention (Devoto et al., arXiv 2510.00636)."""

from collections.abc import Mapping

import numpy as np

from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import checked, tokens
from kvjax.scoring.key_scores import ExpectedAttention
from kvjax.scoring.learned import FrozenArrays
from kvjax.scoring.measurements import FutureQueries
from kvjax.scoring.protect import Protect
from kvjax.sizes.budget import Count, Tokens, as_count


def expected_attention(
    budget: int | float | Count,
    *,
    horizon: int = 512,
    sinks: int = 4,
    covariance: bool = True,
    eps: float = 0.0,
    value_norms: bool = True,
    queries: Mapping[str, np.ndarray] | FrozenArrays | None = None,
) -> Evict:
    """Keeps the tokens that queries to come are expected to attend to, weighted by their values' norms.

    See `key_scores.ExpectedAttention`. The sinks' queries do not count in the model of queries, and sinks stay.

    Args:
      budget: live tokens a kv head and layer, sinks included. A prompt whose share cannot hold the sinks is kept whole.
      horizon: positions ahead whose rotations are averaged.
      sinks: first tokens that stay.
      covariance: whether the queries' covariance counts.
      eps: added to the weight (0.01 in the leaderboard of its authors, with adaptive head budgets).
      value_norms: weigh tokens by their values' norms; without, as CriticalKV wants its base.
      queries: moments of the model's queries, which `kvjax.learning.probes.fit_queries` finds, in place of those of the
        prompt: "mean" (L, N, H) and "covariance" (L, N, H, H), before rotation.
    """
    count, sinks = as_count(budget, "budget"), checked(tokens(), "sinks", sinks)
    if isinstance(count, Tokens):
        sinks = min(sinks, count.n)
    score = ExpectedAttention(FutureQueries(horizon, sinks, queries), covariance, eps, value_norms)
    return Evict(score, budget, protect=Protect(sinks=sinks))
