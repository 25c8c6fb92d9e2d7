"""Scissorhands."""

from typing import Literal

from kvjax import Share, methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    history: int = 400,
    recent: int = 10,
    drop_share: float = 0.5,
    element: Literal["above", "p"] = "above",
    decay: float = 1.0,
    setup: Common = Setup(),
) -> Experiment:
    """The tokens that most of the last rows gave more than average; half of the cache goes at once.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      history: rows that count.
      recent: protected last tokens.
      drop_share: what a full cache loses at once, as a share of the budget.
      element: "p" sums probabilities instead of counting rows.
      decay: of that sum at every step.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "scissorhands",
        sweep(
            lambda b: methods.scissorhands(
                b, history=history, recent=recent, drop=Share(drop_share), element=element, decay=decay
            ),
            budget,
        ),
        setup,
    )
