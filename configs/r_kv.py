"""R-KV."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    importance: float = 0.1,
    window_size: int = 8,
    kernel_size: int = 7,
    threshold: float = 0.5,
    buffer: int = 16,
    setup: Common = Setup(),
) -> Experiment:
    """What the last rows look at, and of what repeats itself the newest; evicts while decoding.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      importance: weight of attention, against redundancy.
      window_size: last tokens, which vote and stay.
      kernel_size: pooling width of the votes, odd.
      threshold: cosines above it are a resemblance.
      buffer: tokens by which a cache grows before it is cut; the paper uses 128 on long reasoning.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "r_kv",
        sweep(
            lambda b: methods.r_kv(
                b,
                importance=importance,
                window_size=window_size,
                kernel_size=kernel_size,
                threshold=threshold,
                buffer=buffer,
            ),
            budget,
        ),
        setup,
    )
