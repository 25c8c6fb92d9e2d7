"""Trains the models that come with the project, from nothing.

    python experiments/train.py embedded              # retrieves facts from filler; 25 minutes on 2 cores
    python experiments/train.py varied --text FILE    # retrieves in many ways; 76 minutes on 2 busy cores

Each is seeded, goes on from its last checkpoint when it is started again, and ends by writing a Hugging Face directory
that `kvjax.models.load` reads. What made them learn stands in `training/embedded.py` and `training/varied.py`.
"""

import importlib

if __name__ == "__main__":  # before imports that take seconds
    importlib.import_module(f"{__package__ or ''}.stopping".lstrip(".")).begin()

import sys

import tyro

from kvjax.experiments.core.command import plain_errors
from kvjax.experiments.core.compiled import read_cache_option
from kvjax.experiments.training import embedded, varied

if __name__ == "__main__":
    with plain_errors():
        trainings = {"embedded": embedded.train, "varied": varied.train}
        tyro.extras.subcommand_cli_from_dict(trainings, args=read_cache_option(sys.argv[1:]), description=__doc__)
