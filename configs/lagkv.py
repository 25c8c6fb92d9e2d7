"""LagKV."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    lag: int = 32,
    sinks: int = 4,
    cross_scoring: bool = False,
    setup: Common = Setup(),
) -> Experiment:
    """The tokens that stand out from the partition of text that follows them.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      lag: tokens of a partition; the paper uses 128 on long prompts.
      sinks: protected first tokens, which belong to no partition.
      cross_scoring: compare scores of different partitions as they are.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "lagkv", sweep(lambda b: methods.lagkv(b, lag=lag, sinks=sinks, cross_scoring=cross_scoring), budget), setup
    )
