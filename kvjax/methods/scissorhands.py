"""Scissorhands (Liu et al., arXiv 2305.17118)."""

from typing import Literal

from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import checked, number, one_of
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Accumulated, History
from kvjax.scoring.stats import AllRows, Observe
from kvjax.sizes.allocation import LayerAllocation, UniformLayers
from kvjax.sizes.budget import Count, Share
from kvjax.sizes.schedule import when_over


def scissorhands(
    budget: int | float | Count,
    *,
    history: int = 400,
    recent: int = 10,
    drop: int | float | Count = Share(0.5),
    theta: float | Literal["1/visible", "1/position"] = "1/visible",
    layers: LayerAllocation = UniformLayers(),
    element: Literal["above", "p"] = "above",
    decay: float = 1.0,
) -> Evict:
    r"""Drops many tokens at once: those that few of the last rows paid more than average attention.

    $S_j$ is the number of rows $i$ among the last `history` with $p_{ij} > 1/t$. A cache is compressed only when the
    token that has just come exceeds its budget, and then loses `drop` tokens at once. The printed pseudo-code clears
    the non-recent part of the importance and calls the accumulation "low score"; read literally it would keep only
    recent tokens. Here recent tokens are safe and low counts go first (D-04). "1/t" is one over the visible keys, or
    over the position.

    The paper gives later layers more budget by a rule of thumb without a formula: `layers` takes any allocation.

    Args:
      budget: the most live tokens a kv head and layer, recent ones included; what the prompt is cut to.
      history: rows that count.
      recent: protected last tokens.
      drop: tokens evicted at once, exactly (`Schedule.drop`): tokens, a share of the prompt (float), or `Share` of the
        budget.
      theta: the threshold.
      layers: how the budget is divided over layers.
      element: "p" sums probabilities instead, as another implementation under this name does, with
      decay: what the sum is multiplied by at every step (D-50). It has no window.
    """
    one_of("element", element, "above", "p")
    decay = checked(number(), "decay", decay)
    if element == "above" and decay != 1.0:
        raise ValueError(f"decay={decay} belongs to element='p'; a history of counts has none")
    score = History(history, theta) if element == "above" else Accumulated(Observe(AllRows()), decay=decay)
    return Evict(score, budget, protect=Protect(recent=recent), layers=layers, when=when_over(1, drop=drop))
