"""LAVa."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    window_size: int = 16,
    kernel_size: int = 7,
    alpha: float = 1.0,
    max_ratio: float = 2.0,
    setup: Common = Setup(),
) -> Experiment:
    """Votes times the largest value of the head; heads and layers compete.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      window_size: the prompt's last tokens, which vote and stay; the paper uses 32 on long prompts.
      kernel_size: pooling width, odd.
      alpha: weight of the competition between heads against a uniform share.
      max_ratio: no layer gets more than this many times the average.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "lava",
        sweep(
            lambda b: methods.lava(
                b, window_size=window_size, kernel_size=kernel_size, alpha=alpha, max_ratio=max_ratio
            ),
            budget,
        ),
        setup,
    )
