"""Mean attention score."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    recent: int | float = 0,
    sinks: int = 0,
    count_self: bool = True,
    setup: Common = Setup(),
) -> Experiment:
    """The tokens of largest mean attention over the rows that could see them.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      recent: protected last tokens: a number (int) or a share of the prompt (float).
      sinks: protected first tokens.
      count_self: whether a token's own row counts.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "mas", sweep(lambda b: methods.mas(b, recent=recent, sinks=sinks, count_self=count_self), budget), setup
    )
