"""SnapKV."""

from typing import Literal

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    window_size: int = 16,
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    group: Literal["mean", "max", "sum"] = "mean",
    setup: Common = Setup(),
) -> Experiment:
    """What the end of the prompt looked at, with its surroundings.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      window_size: the prompt's last tokens, which vote and stay; the papers use 32 on long prompts.
      kernel_size: pooling width, odd.
      pooling: kind of pooling.
      group: how the query heads of a kv head are combined.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "snapkv",
        sweep(
            lambda b: methods.snapkv(b, window_size=window_size, kernel_size=kernel_size, pooling=pooling, group=group),
            budget,
        ),
        setup,
    )
