"""StreamingLLM (Xiao et al., arXiv 2309.17453)."""

from kvjax.cache.state import Positions
from kvjax.eviction import Evict
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Recency
from kvjax.sizes.budget import Count
from kvjax.sizes.schedule import before_append


def streaming_llm(budget: int | float | Count, *, sinks: int = 4, positions: Positions = "compact") -> Evict:
    """Keeps `sinks` attention sinks and the most recent tokens.

    Eviction happens before a new token is appended, so a cache never holds more than `budget`. Keys are rotated by
    their rank in the cache, not by their position in the text ("compact"), as in the paper's section 3.2 and its code.
    Prompts no longer than the budget are untouched.

    Implementations differ in what they call the window: the released code counts 4 sinks beside a window of 512, others
    put the sinks inside the capacity. Here the sinks are inside `budget`.

    Args:
      budget: live tokens a kv head and layer, sinks included. A prompt whose share cannot hold the sinks is kept whole.
      sinks: first tokens that always stay.
      positions: "compact", or "original" for absolute positions.
    """
    return Evict(Recency(), budget, protect=Protect(sinks=sinks), when=before_append(), positions=positions)
