"""Methods that look at positions alone."""

from typing import Literal

from kvjax.core.budgets import STEP, Schedule
from kvjax.core.contract import Count, Layout, Policy
from kvjax.core.evict import Evict
from kvjax.core.scores.attention import Recency, Uniform


def full() -> Policy:
    """The full cache: every token stays."""
    return Policy()


def window(budget: Count, *, sinks: Count = 0) -> Evict:
    """Keeps the most recent tokens, and the first `sinks`.

    Args:
      budget: live tokens a kv head and layer.
      sinks: first tokens that stay.
    """
    return Evict(Recency(), budget, sinks, when=STEP)


def streaming_llm(
    budget: Count, *, sinks: int = 4, positions: Literal["shifted", "rank", "original"] = "shifted"
) -> Evict:
    """Keeps attention sinks and the most recent tokens (StreamingLLM, Xiao et al., arXiv 2309.17453).

    A new token's place is made before it is stored, so that a cache never holds more than its budget. Tokens stand at
    their rank in the cache (section 3.2).

    Args:
      budget: live tokens a kv head and layer, sinks included.
      sinks: first tokens that stay.
      positions: "shifted" or "rank" places tokens by rank: "shifted" is the fast way where nothing else evicts, "rank"
        works in a chain too. "original" leaves tokens where they stood in the text.
    """
    layout = Layout(positions, sinks if positions == "shifted" else 0)
    return Evict(Recency(), budget, sinks, when=Schedule(every=1, before=True), layout=layout)


def random(budget: Count, *, recent: Count = 1) -> Evict:
    """Evicts uniformly at random, every kv head for itself: a baseline. Draws are new at every eviction.

    Args:
      budget: live tokens a kv head and layer.
      recent: last tokens that stay.
    """
    return Evict(Uniform(), budget, 0, recent, when=STEP)
