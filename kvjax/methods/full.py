"""The full cache: nothing is evicted."""

from kvjax.algebra import identity
from kvjax.policy import Policy


def full() -> Policy:
    """Keeps everything and grows without bound: the baseline, and the upper line of every plot."""
    return identity()
