"""A learned prediction of future attention."""

from typing import Annotated

import tyro

from kvjax.configs.experiment import Budget
from kvjax.configs.learning import LearnedScorer, Prompts


def get_config(
    budget: tuple[Budget, ...] = (0.0625, 0.125, 0.25),
    hidden: int = 16,
    window_size: int = 16,
    kernel_size: int = 7,
    steps: int = 300,
    rate: float = 3e-3,
    prompts: Annotated[Prompts, tyro.conf.arg(name="")] = Prompts(),
) -> LearnedScorer:
    """A small head on keys, values and statistics, in SnapKV's place.

    Args:
      budget: live tokens a kv head and layer at which it is measured: numbers of tokens (int) or shares of the prompt.
      hidden: units of its hidden layer.
      window_size: the prompt's last tokens, which vote and stay.
      kernel_size: pooling width of votes, odd.
      steps: updates.
      rate: Adam's first learning rate.
      prompts: model, prompts and sizes.
    """
    return LearnedScorer("learned_scorer", budget, hidden, window_size, kernel_size, steps, rate, prompts)
