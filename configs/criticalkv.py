"""CriticalKV."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    window_size: int = 16,
    first_stage: float = 0.5,
    eps: float = 1e-4,
    setup: Common = Setup(),
) -> Experiment:
    """SnapKV's scores, corrected for what values contribute to the output.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      window_size: the prompt's last tokens, which vote and stay.
      first_stage: share of the budget that goes by scores alone.
      eps: added to the mean attention of the voting rows in the second stage.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "criticalkv",
        sweep(
            lambda b: methods.criticalkv(
                b, base=methods.snapkv(b, window_size=window_size), first_stage=first_stage, eps=eps
            ),
            budget,
        ),
        setup,
    )
