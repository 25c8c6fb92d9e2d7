"""Recency."""

from kvjax.budget import Count
from kvjax.policy import Evict
from kvjax.schedule import every_step
from kvjax.scores import Recency


def window(budget: int | float | Count) -> Evict:
    r"""Keeps the `budget` most recent tokens, the current one included.

    $S_j = j$, evicted at every step. EasyKV's "recency" differs: it keeps 4 sinks while reading a prompt and never
    evicts prompt tokens while decoding (D-06).

    Args:
      budget: live tokens a kv head and layer.
    """
    return Evict(Recency(), budget, when=every_step())
