"""KeyDiff."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    setup: Common = Setup(),
) -> Experiment:
    """The keys that are unlike the others.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      setup: model, tasks and sizes.
    """
    return Experiment("keydiff", sweep(lambda b: methods.keydiff(b), budget), setup)
