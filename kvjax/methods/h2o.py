"""H2O: heavy-hitter oracle (Zhang et al., arXiv 2306.14048)."""

from typing import Literal, overload

from kvjax.eviction import Evict
from kvjax.methods.simulations import NextStepMask, StepwiseMask
from kvjax.pallas_kernels.values import one_of
from kvjax.policy import Policy
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Accumulated
from kvjax.scoring.stats import AllRows, Observe
from kvjax.sizes.budget import Count, Fixed, Less, Share, as_budget, as_count
from kvjax.sizes.schedule import every_step


@overload
def h2o(
    budget: int | float | Count,
    *,
    recent: int | float | Count = ...,
    group: Literal["mean", "max", "sum"] = ...,
    prefill: Literal["oneshot"] = ...,
    compat: None = ...,
) -> Evict: ...
@overload
def h2o(
    budget: int | float | Count,
    *,
    recent: int | float | Count = ...,
    group: Literal["mean", "max", "sum"] = ...,
    prefill: Literal["oneshot", "stepwise_mask"] = ...,
    compat: Literal["h2o_hh_mask"] | None = ...,
) -> Policy: ...
def h2o(
    budget: int | float | Count,
    *,
    recent: int | float | Count = Share(0.5),
    group: Literal["mean", "max", "sum"] = "mean",
    prefill: Literal["oneshot", "stepwise_mask"] = "oneshot",
    compat: Literal["h2o_hh_mask"] | None = None,
) -> Policy:
    r"""Keeps the most attended tokens and a recent window.

    $S_j = \sum_i p_{ij}$ over all rows, prompt and decode, each row's own token included. The prompt is evicted once
    from the complete column sums (as the released real-eviction code does; the paper reads as greedy eviction while
    reading, D-01), then every decode step adds its row and evicts one token.

    The paper's experiments split the budget equally between heavy hitters and recent tokens. The recent window is
    exactly `recent` existing tokens: the released masking simulation counts the upcoming token among them and hides one
    token for a step (D-02). Its class breaks for grouped queries; here the group's mean is used.

    Args:
      budget: live tokens a kv head and layer, recent ones included.
      recent: protected last tokens: tokens, a share of the prompt (float), or `Share` of the budget. 0 is key attention
        only.
      group: how a group's query heads are combined.
      prefill: "stepwise_mask" simulates greedy eviction while the text is read (`simulations.StepwiseMask`).
      compat: "h2o_hh_mask" reproduces the released masking simulation (`simulations.NextStepMask`).
    """
    one_of("prefill", prefill, "oneshot", "stepwise_mask")
    one_of("compat", compat, None, "h2o_hh_mask")
    if prefill == "stepwise_mask" and compat is not None:
        raise ValueError(f"prefill={prefill!r} and compat={compat!r} are two simulations; give one of them")
    of = Observe(AllRows(), group=group)
    if prefill == "oneshot" and compat is None:
        return Evict(Accumulated(of), budget, protect=Protect(recent=recent), when=every_step())
    budget, recent = as_budget(budget), as_count(recent, "recent")
    recent = Fixed(recent, budget)
    heavy = Less(budget, recent)
    return StepwiseMask(heavy, recent, of) if prefill == "stepwise_mask" else NextStepMask(heavy, recent, of)
