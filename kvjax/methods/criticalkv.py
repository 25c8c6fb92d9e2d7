"""CriticalKV (Feng et al., arXiv 2502.03805)."""

import dataclasses

from kvjax.eviction import Evict
from kvjax.methods.snapkv import snapkv
from kvjax.pallas_kernels.values import a, checked, optional
from kvjax.scoring.measurements import ProjectedValueNorm
from kvjax.scoring.select import TwoStage
from kvjax.sizes.budget import Count


def criticalkv(
    budget: int | float | Count,
    *,
    base: Evict | None = None,
    first_stage: float = 0.5,
    eps: float = 1e-4,
    least: int | float | Count = 0,
) -> Evict:
    r"""Another policy's scores, corrected for what values contribute to the layer's output.

    The first stage keeps the best by the base score; the second ranks the rest by
    $(S_j + \epsilon) \lVert v_j W_O \rVert_1$, the norm averaged over the group. As in the published code $S_j$ is the
    mean over the window's rows here: where the base sums them, epsilon is as many times larger. With
    `heads=Adaptive()` in the base, head budgets are allocated first.

    Args:
      budget: live tokens a kv head and layer. A prompt whose share cannot hold what the base protects is kept whole.
      base: the policy whose scores, protection and schedule are used, SnapKV if None; its budget is replaced.
      first_stage: share of the budget that the first stage fills, one token at least unless it is 0.
      eps: added to the mean attention of the voting rows (and heads, under `group="sum"`) in the second stage. Scores
        that are no sum of a window, such as H2O's, get it as they stand.
      least: tokens that the first stage fills at least. In kvpress's CriticalAdaKV those are what the safeguard leaves
        every head, `Share(0.2, "int")` of the budget.
    """
    checked(optional(a(Evict)), "base", base)
    base = snapkv(budget) if base is None else dataclasses.replace(base, budget=budget)
    return dataclasses.replace(base, select=TwoStage(ProjectedValueNorm(), first_stage, eps, least=least))
