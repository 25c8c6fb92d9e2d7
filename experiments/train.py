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

from kvjax.experiments.core.command import script
from kvjax.experiments.core.compiled import read_cache_option
from kvjax.experiments.training import embedded, varied

if __name__ == "__main__":
    trainings = {"embedded": embedded.train, "varied": varied.train}
    script(trainings, read_cache_option(sys.argv[1:]), description=__doc__)
