"""DefensiveKV."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    window_size: int = 16,
    kernel_size: int = 5,
    mass: float = 0.9,
    setup: Common = Setup(),
) -> Experiment:
    """The worst case over the window's rows instead of their mean.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      window_size: the prompt's last tokens, which vote and stay; the paper uses 32 on long prompts.
      kernel_size: averaging width, odd.
      mass: of the attention that comes first.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "defensivekv",
        sweep(lambda b: methods.defensivekv(b, window_size=window_size, kernel_size=kernel_size, mass=mass), budget),
        setup,
    )
