"""The full cache."""

from configs.experiment import Common, Experiment, Setup
from kvjax import methods


def get_config(setup: Common = Setup()) -> Experiment:
    """Everything is kept.

    Args:
      setup: model, tasks and sizes.
    """
    return Experiment("full", ((1.0, methods.full()),), setup)
