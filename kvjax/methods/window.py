"""Recency."""

from typing import Literal

from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import one_of
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Recency
from kvjax.sizes.budget import Count, Ratio, Sum, as_count
from kvjax.sizes.schedule import every_step


def window(budget: int | float | Count, *, sinks: int = 0, scope: Literal["all", "generated"] = "all") -> Evict:
    r"""Keeps the `budget` most recent tokens, the current one included.

    $S_j = j$, evicted at every step. EasyKV's "recency" differs: it keeps 4 sinks while reading a prompt and never
    evicts prompt tokens while decoding (D-06).

    Args:
      budget: live tokens a kv head and layer.
      sinks: first tokens that stay.
      scope: "generated" keeps the prompt, outside the budget, and evicts generated tokens only.
    """
    one_of("scope", scope, "all", "generated")
    if scope == "generated":
        return Evict(
            Recency(), Sum((Ratio(1.0), as_count(budget, "budget"))), protect=Protect(Ratio(1.0)), when=every_step()
        )
    return Evict(Recency(), budget, protect=Protect(sinks), when=every_step())
