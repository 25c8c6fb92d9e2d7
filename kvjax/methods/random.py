"""Uniformly random eviction."""

from kvjax.budget import Count
from kvjax.policy import Evict
from kvjax.protect import Protect
from kvjax.schedule import every_step
from kvjax.scores import Uniform


def random(budget: int | float | Count, *, protect_recent: int = 1, sinks: int = 0) -> Evict:
    """Evicts uniformly at random, independently in every layer and kv head, with fresh draws at every eviction.

    EasyKV drops one index shared by all heads and layers, and in block-wise prefill one contiguous run (D-05).

    Args:
      budget: live tokens a kv head and layer.
      protect_recent: last tokens that stay; 1 keeps the newest.
      sinks: first tokens that stay.
    """
    return Evict(Uniform(), budget, protect=Protect(sinks, protect_recent), when=every_step())
