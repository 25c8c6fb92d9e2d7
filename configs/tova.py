"""TOVA."""

from typing import Literal

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    head_mode: Literal["layer_mean", "per_kv_head"] = "layer_mean",
    sinks: int = 0,
    protect_last: int = 0,
    setup: Common = Setup(),
) -> Experiment:
    """Attention of the newest token.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      head_mode: whether all heads of a layer keep the same tokens.
      sinks: first tokens that stay.
      protect_last: last tokens that stay.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "tova",
        sweep(lambda b: methods.tova(b, head_mode=head_mode, sinks=sinks, protect_last=protect_last), budget),
        setup,
    )
