"""Ada-SnapKV."""

from typing import Literal

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    alpha: float = 0.5,
    window_size: int = 16,
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    group: Literal["mean", "max", "sum"] = "mean",
    max_ratio: float = float("inf"),
    storage: Literal["dense", "pool"] = "pool",
    setup: Common = Setup(),
) -> Experiment:
    """SnapKV where the heads of a layer compete for its budget.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      alpha: weight of the adaptive share; 0 is SnapKV.
      window_size: the prompt's last tokens, which vote and stay; the papers use 32 on long prompts.
      kernel_size: pooling width, odd.
      pooling: kind of pooling.
      group: how the query heads of a kv head are combined.
      max_ratio: no head gets more than this many times the average.
      storage: "pool" allocates a layer what its heads need together, "dense" every head the slots of the largest.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "ada_snapkv",
        sweep(
            lambda b: methods.ada_snapkv(
                b,
                alpha=alpha,
                window_size=window_size,
                kernel_size=kernel_size,
                pooling=pooling,
                group=group,
                max_ratio=max_ratio,
                storage=storage,
            ),
            budget,
        ),
        setup,
    )
