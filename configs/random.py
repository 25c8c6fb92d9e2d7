"""Uniformly random eviction."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS, protect_recent: int = 1, sinks: int = 0, setup: Common = Setup()
) -> Experiment:
    """Random eviction.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      protect_recent: last tokens that stay.
      sinks: first tokens that stay.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "random", sweep(lambda b: methods.random(b, protect_recent=protect_recent, sinks=sinks), budget), setup
    )
