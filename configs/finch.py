"""FINCH."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    window_size: int = 16,
    normalize: bool = True,
    chunk_length: int | None = None,
    setup: Common = Setup(),
) -> Experiment:
    """What the question at the end looks at, moved together.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      window_size: tokens of the question.
      normalize: weigh rows by their length.
      chunk_length: tokens of a chunk that keeps its own share; None for one choice among all.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "finch",
        sweep(
            lambda b: methods.finch(b, window_size=window_size, normalize=normalize, chunk_length=chunk_length), budget
        ),
        setup,
    )
