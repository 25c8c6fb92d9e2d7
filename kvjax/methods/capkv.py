"""CAPKV (arXiv 2604.25975)."""

from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import checked, tokens
from kvjax.scoring.key_scores import Capacity
from kvjax.scoring.measurements import FutureQueries
from kvjax.scoring.protect import Protect
from kvjax.sizes.budget import Count, Tokens, as_count


def capkv(
    budget: int | float | Count,
    *,
    tau: float = 5.0,
    horizon: int = 512,
    sinks: int = 4,
    eps: float = 1e-6,
) -> Evict:
    r"""Keeps the tokens whose values the others cannot stand for, those that queries look towards first.

    $S_j = w_j \, v_j^\top A^{-1} v_j$ with $A = I + \sum_i (w_i + \epsilon) v_i v_i^\top$, and $w_j$ by the cosine of
    the key and the mean query to come (`kvjax.scoring.key_scores.Capacity` has the formulas), as in kvpress
    (`CapPress`). Queries to come are modelled as for `expected_attention`.

    Args:
      budget: live tokens a kv head and layer, sinks included.
      tau: $\tau$, how sharply queries choose.
      horizon: positions ahead whose rotations are averaged.
      sinks: first tokens that stay, and whose queries do not count.
      eps: $\epsilon$, added to weights.
    """
    count, sinks = as_count(budget, "budget"), checked(tokens(), "sinks", sinks)
    if isinstance(count, Tokens):
        sinks = min(sinks, count.n)
    return Evict(Capacity(FutureQueries(horizon, sinks), tau, eps), budget, protect=Protect(sinks=sinks))
