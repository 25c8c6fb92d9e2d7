"""CAKE."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    window_size: int = 16,
    kernel_size: int = 5,
    variance: float = 200.0,
    tau1: float = 1.6,
    tau2: float = 0.6,
    max_ratio: float = 2.0,
    setup: Common = Setup(),
) -> Experiment:
    """Layers share the budget as their attention asks for it.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      window_size: the prompt's last tokens, which vote and stay; the paper uses 32 on long prompts.
      kernel_size: pooling width, odd.
      variance: weight of the variance over rows.
      tau1: temperature of the entropy.
      tau2: temperature of the variance.
      max_ratio: no layer gets more than this many times the average.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "cake",
        sweep(
            lambda b: methods.cake(
                b,
                window_size=window_size,
                kernel_size=kernel_size,
                variance=variance,
                tau1=tau1,
                tau2=tau2,
                max_ratio=max_ratio,
            ),
            budget,
        ),
        setup,
    )
