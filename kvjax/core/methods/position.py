"""Methods that look at positions alone."""

from kvjax.core.budgets import STEP, Schedule
from kvjax.core.contract import Layout, Policy
from kvjax.core.evict import Evict
from kvjax.core.scores.attention import Recency, Uniform


def full():
    """The full cache."""
    return Policy()


def window(budget, *, sinks=0):
    """The first and the most recent tokens."""
    return Evict(Recency(), budget, sinks, when=STEP)


def streaming_llm(budget, *, sinks=4, positions="shifted"):
    """Attention sinks and recent tokens, at places by rank in the cache (Xiao et al., arXiv 2309.17453)."""
    return Evict(
        Recency(),
        budget,
        sinks,
        when=Schedule(every=1, before=True),
        layout=Layout(positions, sinks if positions == "shifted" else 0),
    )


def random(budget, *, recent=1):
    """Uniformly at random, with fresh draws at every eviction."""
    return Evict(Uniform(), budget, 0, recent, when=STEP)
