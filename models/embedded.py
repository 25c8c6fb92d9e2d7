"""The models that come with the project: small, made to retrieve, trained by `experiments/train.py embedded` and
`experiments/train.py varied`.
"""

import pathlib
from typing import Final

EMBEDDED: Final = pathlib.Path(__file__).parent / "tiny_retriever"
VARIED: Final = pathlib.Path(__file__).parent / "varied_retriever"
INCLUDED: Final = {"embedded": EMBEDDED, "varied": VARIED}


def included(name: str) -> str | pathlib.Path:
    """The directory of a model of `INCLUDED`; any other name as it is.

    Raises:
      ValueError: the varied model, from a wheel, which does not hold it.
    """
    found = INCLUDED.get(name, name)
    if found == VARIED and not VARIED.is_dir():
        raise ValueError(
            "the varied model comes with the repository, not with the wheel; run this in a clone, or make it, in 76 "
            "minutes: kvjax train varied --text FILE, and name its directory in place of varied"
        )
    return found
