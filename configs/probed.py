"""What `experiments/probe.py` has found of a model."""

import pathlib

import numpy as np

from configs.experiment import Common


def probed(setup: Common, given: str, name: str) -> np.ndarray:
    """An array of a model: of the file that is given, or the one beside the model's weights.

    Args:
      setup: names the model.
      given: a file, or nothing.
      name: what `experiments/probe.py` calls it.

    Raises:
      ValueError: there is none.
    """
    file = pathlib.Path(given) if given else pathlib.Path(setup.source) / f"{name}.npy"
    if not file.is_file():
        raise ValueError(
            f"there is no {file}; make one: python experiments/probe.py {name} --model {setup.model} --output "
            f"{name}.npy, and give it as an option"
        )
    return np.load(file, allow_pickle=False)
