"""H2O."""

from typing import Literal

from kvjax import Share, methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    recent_share: float = 0.5,
    group: Literal["mean", "max", "sum"] = "mean",
    setup: Common = Setup(),
) -> Experiment:
    """Accumulated attention and a recent window.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      recent_share: share of the budget that goes to the most recent tokens.
      group: how the query heads of a kv head are combined.
      setup: model, tasks and sizes.
    """
    return Experiment("h2o", sweep(lambda b: methods.h2o(b, recent=Share(recent_share), group=group), budget), setup)
