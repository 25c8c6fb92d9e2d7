"""Methods that look at positions alone."""

from kvjax.budgets import STEP, Schedule
from kvjax.compose.evict import Evict
from kvjax.contract import Amount, Count, Layout, Policy, Size
from kvjax.scores.attention import Recency, Uniform


def full() -> Policy:
    """The full cache: every token stays."""
    return Policy()


def window(budget: Count) -> Evict:
    """Keeps the most recent tokens: a baseline.

    Args:
      budget: live tokens a kv head and layer.
    """
    return Evict(Recency(), budget, when=STEP)


def streaming_llm(budget: Count, *, sinks: Amount = 4) -> Evict:
    """Keeps attention sinks and the most recent tokens (StreamingLLM, Xiao et al., arXiv 2309.17453).

    A new token's place is made before it is read, so that no row sees more than the budget. Tokens stand at
    their rank in the cache (section 3.2).

    Args:
      budget: live tokens a kv head and layer, sinks included.
      sinks: first tokens that stay.
    """
    return Evict(Recency(), budget, sinks, when=Schedule(every=1, before=True), layout=Layout("shifted"))


def random(budget: Count) -> Evict:
    """Evicts uniformly at random, every kv head for itself; the newest token stays. A baseline.

    Draws are new at every eviction.

    Args:
      budget: live tokens a kv head and layer.
    """
    return Evict(Uniform(), budget, 0, 1, when=STEP)


def random_attention(budget: Count, *, every: Size = 128) -> Evict:
    """Keeps the whole prompt, and a random sample of what follows (Random Attention, arXiv 2609.03430).

    Every kv head draws for itself, anew at every eviction: while decoding, when it holds `every` tokens beyond its
    budget. The newest token may go.

    Args:
      budget: live tokens a kv head and layer after an eviction, the prompt included: `Combined("sum", (1.0, 512))` is
        the prompt and 512 more. One that does not hold the prompt is refused.
      every: tokens by which a cache grows.
    """
    return Evict(Uniform(), budget, 1.0, when=Schedule(over=every))
