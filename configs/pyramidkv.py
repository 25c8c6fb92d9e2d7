"""PyramidKV."""

from typing import Literal

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    beta: float = 20.0,
    window_size: int = 8,
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    group: Literal["mean", "max", "sum"] = "mean",
    setup: Common = Setup(),
) -> Experiment:
    """SnapKV with budgets that fall from layer to layer.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      beta: steepness; 1 is uniform.
      window_size: the prompt's last tokens, which vote and stay.
      kernel_size: pooling width, odd.
      pooling: kind of pooling.
      group: how the query heads of a kv head are combined.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "pyramidkv",
        sweep(
            lambda b: methods.pyramidkv(
                b, beta=beta, window_size=window_size, kernel_size=kernel_size, pooling=pooling, group=group
            ),
            budget,
        ),
        setup,
    )
