"""Q-Filters."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep
from kvjax.configs.probed import probed


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    filters: str = "",
    setup: Common = Setup(),
) -> Experiment:
    """Keys against the direction in which a head's queries spread.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      filters: what `experiments/probe.py filters` wrote for the model; that beside its weights if empty.
      setup: model, tasks and sizes.
    """
    array = probed(setup, filters, "filters")
    return Experiment("q_filters", sweep(lambda b: methods.q_filters(b, array), budget), setup)
