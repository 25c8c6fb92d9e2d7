"""CurDKV."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    partition: int = 16,
    sinks: int = 4,
    setup: Common = Setup(),
) -> Experiment:
    """Leverage of keys and values, from their norms alone.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      partition: tokens of a partition, within which norms are compared.
      sinks: protected first tokens.
      setup: model, tasks and sizes.
    """
    return Experiment("curdkv", sweep(lambda b: methods.curdkv(b, partition=partition, sinks=sinks), budget), setup)
