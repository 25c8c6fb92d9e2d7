"""The models that come with the project, trained by `train.py`: two retrieve facts, one works step by step."""

import pathlib
from typing import Final

EMBEDDED: Final = pathlib.Path(__file__).parent / "tiny_retriever"
VARIED: Final = pathlib.Path(__file__).parent / "varied_retriever"
REASONER: Final = pathlib.Path(__file__).parent / "reasoner"
INCLUDED: Final = {"embedded": EMBEDDED, "varied": VARIED, "reasoner": REASONER}
_MADE_BY: Final = {
    "varied": "76 minutes: kvjax train varied --text FILE",
    "reasoner": "38 minutes: kvjax train reasoner",
}
"""Of those that a wheel does not hold."""


def included(name: str) -> str | pathlib.Path:
    """The directory of a model of `INCLUDED`; any other name as it is.

    Raises:
      ValueError: a model that a wheel does not hold, from a wheel.
    """
    found = INCLUDED.get(name, name)
    if name in _MADE_BY and not pathlib.Path(found).is_dir():
        raise ValueError(
            f"the model {name} comes with the repository, not with the wheel; run this in a clone, or make it, in "
            f"{_MADE_BY[name]}, and name its directory in place of {name}"
        )
    return found
