"""Layer-DefensiveKV."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    window_size: int = 16,
    kernel_size: int = 5,
    mass: float = 0.9,
    max_ratio: float = 2.0,
    setup: Common = Setup(),
) -> Experiment:
    """DefensiveKV's scores, for whose best all layers and heads compete.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      window_size: the prompt's last tokens, which vote and stay; the paper uses 32 on long prompts.
      kernel_size: averaging width, odd.
      mass: of the attention that comes first.
      max_ratio: no layer gets more than this many times the average.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "layer_defensivekv",
        sweep(
            lambda b: methods.layer_defensivekv(
                b, window_size=window_size, kernel_size=kernel_size, mass=mass, max_ratio=max_ratio
            ),
            budget,
        ),
        setup,
    )
