"""FastGen."""

from typing import Literal

from kvjax import methods, models
from kvjax.configs.experiment import Budget, Common, Experiment, Setup


def get_config(
    recovery_ratio: tuple[float, ...] = (0.98, 0.95, 0.9),
    recovery: Literal["mass", "elementwise"] = "mass",
    frequent_ratio: float = 0.3,
    local_ratio: float = 0.3,
    cap: Budget | None = None,
    storage: Literal["dense", "pool"] = "dense",
    setup: Common = Setup(),
) -> Experiment:
    """Every head keeps the cheapest set of tokens that recovers its attention; what that takes is an outcome.

    Args:
      recovery_ratio: how much of a head's attention to the prompt its set must recover.
      recovery: the recovered probability mass, or the share of entries that hardly change.
      frequent_ratio: tokens with the highest accumulated attention, as a share of all tokens so far.
      local_ratio: the newest tokens, as a share of the prompt.
      cap: the most tokens that any head keeps: a number (int) or a share of the prompt (float).
      storage: "pool" gives a layer as many slots as `cap` a head, which its heads share as they need.
      setup: model, tasks and sizes.
    """
    if not recovery_ratio:
        raise ValueError("recovery_ratio is empty; give at least one number between 0 and 1")
    special, punctuation = models.token_classes(models.load_tokenizer(setup.source))
    make = lambda ratio: methods.fastgen(
        special_ids=special,
        punctuation_ids=punctuation,
        frequent_ratio=frequent_ratio,
        local_ratio=local_ratio,
        recovery_ratio=ratio,
        recovery=recovery,
        budget=cap,
        storage=storage,
    )
    return Experiment("fastgen", tuple((f"T={ratio}", make(ratio)) for ratio in recovery_ratio), setup)
