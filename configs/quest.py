"""Quest."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, check_budgets, label


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    page_size: int = 16,
    dense_layers: int = 2,
    setup: Common = Setup(),
) -> Experiment:
    """Everything stays, and a decode row reads the pages whose bounds for its queries are largest.

    Args:
      budget: tokens that a row reads of a kv head: numbers of tokens (int) or shares of the prompt (float).
      page_size: positions of a page.
      dense_layers: the first layers, whose rows read everything.
      setup: model, tasks and sizes.
    """
    check_budgets(budget)
    make = lambda b: methods.quest(b, page_size=page_size, dense_layers=dense_layers)
    return Experiment("quest", tuple((f"reads-{label(b)}", make(b)) for b in budget), setup)
