"""Above-average query count."""

from kvjax import Share, methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    recent_share: float = 0.5,
    setup: Common = Setup(),
) -> Experiment:
    """The tokens that most rows gave more than average attention.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      recent_share: protected last tokens, as a share of the budget.
      setup: model, tasks and sizes.
    """
    return Experiment("aqas", sweep(lambda b: methods.aqas(b, recent=Share(recent_share)), budget), setup)
