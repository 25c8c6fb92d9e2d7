"""AQAS: above-average query count (RoCo's baseline, Ren and Zhu, arXiv 2402.06262, section 3)."""

from kvjax.eviction import Evict
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Accumulated
from kvjax.scoring.select import Ties, TopK
from kvjax.scoring.stats import Observe
from kvjax.sizes.budget import Count, Share
from kvjax.sizes.schedule import every_step


def aqas(
    budget: int | float | Count,
    *,
    recent: int | float | Count = Share(0.5),
    threshold: float | str = "1/visible",
    ties: Ties = "evict_older",
) -> Evict:
    r"""Evicts the token that the fewest rows gave more than average.

    $S_j$ is the number of rows $i$ with $p_{ij} > 1 / |\mathrm{visible}(i)|$, strictly, since insertion. The group's
    mean is taken before the comparison. EasyKV never released this policy (D-03); ties are frequent and belong to it.

    Args:
      budget: live tokens a kv head and layer, recent ones included.
      recent: protected last tokens.
      threshold: see `Observe`.
      ties: see `TopK`.
    """
    score = Accumulated(Observe(element="above", threshold=threshold))
    return Evict(score, budget, protect=Protect(recent=recent), when=every_step(), select=TopK(ties))
