"""The full cache."""

from kvjax import methods
from kvjax.configs.experiment import Common, Experiment, Setup


def get_config(setup: Common = Setup()) -> Experiment:
    """Everything is kept.

    Args:
      setup: model, tasks and sizes.
    """
    return Experiment("full", ((1.0, methods.full()),), setup)
