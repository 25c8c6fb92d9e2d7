"""CAPKV."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    tau: float = 5.0,
    horizon: int = 512,
    sinks: int = 4,
    setup: Common = Setup(),
) -> Experiment:
    """Values that the others cannot stand for, weighed by queries to come.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      tau: how sharply queries choose.
      horizon: positions ahead whose rotations are averaged.
      sinks: first tokens that stay.
      setup: model, tasks and sizes.
    """
    make = lambda b: methods.capkv(b, tau=tau, horizon=horizon, sinks=sinks)
    return Experiment("capkv", sweep(make, budget), setup)
