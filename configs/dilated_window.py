"""Dilated window."""

from typing import Literal

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    dilation: int = 1,
    mode: Literal["mask", "anchored"] = "mask",
    setup: Common = Setup(),
) -> Experiment:
    """The current token and every (dilation + 1)-th before it.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      dilation: tokens left out between two visible ones.
      mode: "mask" keeps a window and hides part of it, "anchored" evicts.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "dilated_window", sweep(lambda b: methods.dilated_window(b, dilation=dilation, mode=mode), budget), setup
    )
