"""Key attention only."""

from typing import Literal

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    group: Literal["mean", "max", "sum"] = "mean",
    setup: Common = Setup(),
) -> Experiment:
    """The most attended tokens, without a recent window.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      group: how the query heads of a kv head are combined.
      setup: model, tasks and sizes.
    """
    return Experiment("key_attention", sweep(lambda b: methods.key_attention(b, group=group), budget), setup)
