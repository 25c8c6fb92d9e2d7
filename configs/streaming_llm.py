"""StreamingLLM."""

from typing import Literal

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    sinks: int = 4,
    positions: Literal["compact", "original"] = "compact",
    setup: Common = Setup(),
) -> Experiment:
    """Attention sinks and a recent window, at compact positions.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      sinks: first tokens that stay.
      positions: how keys are rotated.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "streaming_llm", sweep(lambda b: methods.streaming_llm(b, sinks=sinks, positions=positions), budget), setup
    )
