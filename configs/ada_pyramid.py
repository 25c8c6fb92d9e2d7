"""Ada-Pyramid."""

from typing import Literal

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    alpha: float = 0.5,
    beta: float = 20.0,
    window_size: int = 16,
    kernel_size: int = 7,
    storage: Literal["dense", "pool"] = "pool",
    setup: Common = Setup(),
) -> Experiment:
    """PyramidKV where the heads of a layer compete for its budget.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      alpha: weight of the adaptive share.
      beta: steepness of the pyramid.
      window_size: the prompt's last tokens, which vote and stay; the paper uses 8, the questions here are longer.
      kernel_size: pooling width, odd.
      storage: "pool" allocates a layer what its heads need together, "dense" every head the slots of the largest.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "ada_pyramid",
        sweep(
            lambda b: methods.ada_pyramid(
                b, alpha=alpha, beta=beta, window_size=window_size, kernel_size=kernel_size, storage=storage
            ),
            budget,
        ),
        setup,
    )
