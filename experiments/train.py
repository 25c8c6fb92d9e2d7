"""Trains the models that come with the project, from nothing.

    python experiments/train.py embedded              # retrieves facts from filler; 25 minutes on 2 cores
    python experiments/train.py reasoner              # works step by step, aloud; 38 minutes on 2 cores
    python experiments/train.py varied --text FILE    # retrieves in many ways; 76 minutes on 2 busy cores

Each is seeded, goes on from its last checkpoint when it is started again, and ends by writing a Hugging Face directory
that `kvjax.models.load` reads. What made them learn stands in `training/embedded.py`, `training/varied.py` and
`training/reasoner.py`.
"""

from collections.abc import Sequence

from kvjax.experiments.core.command import as_command, parsed
from kvjax.experiments.training import embedded, reasoner, varied


@as_command
def main(argv: Sequence[str]) -> None:
    """Trains what the first argument names."""
    parsed({"embedded": embedded.train, "varied": varied.train, "reasoner": reasoner.train}, argv, "train", __doc__)


if __name__ == "__main__":
    main()
