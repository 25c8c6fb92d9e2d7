"""RoCo."""

from kvjax import Share, methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    scope_share: float = 0.5,
    protect_last: int | None = None,
    sinks: int = 0,
    count_self: bool = True,
    setup: Common = Setup(),
) -> Experiment:
    """The tokens of largest mean attention, and those whose attention varies most.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      scope_share: tokens of largest deviation that stay, as a share of the budget.
      protect_last: protected last tokens; 10, but at most a quarter of the budget, if not given.
      sinks: protected first tokens.
      count_self: whether a token's own row counts.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "roco",
        sweep(
            lambda b: methods.roco(
                b, scope=Share(scope_share), protect_last=protect_last, sinks=sinks, count_self=count_self
            ),
            budget,
        ),
        setup,
    )
