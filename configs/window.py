"""Recency."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(budget: tuple[Budget, ...] = BUDGETS, setup: Common = Setup()) -> Experiment:
    """The most recent tokens.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      setup: model, tasks and sizes.
    """
    return Experiment("window", sweep(lambda b: methods.window(b), budget), setup)
