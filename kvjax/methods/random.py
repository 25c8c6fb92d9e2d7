"""Uniformly random eviction."""

from typing import Literal

from kvjax.budget import Count
from kvjax.choice import one_of
from kvjax.eviction import Evict
from kvjax.protect import Protect
from kvjax.schedule import every_step
from kvjax.scores import Uniform
from kvjax.select import RandomRun, TopK


def random(
    budget: int | float | Count,
    *,
    protect_recent: int = 1,
    sinks: int = 0,
    shared_heads: bool = False,
    random_mode: Literal["independent", "run"] = "independent",
) -> Evict:
    """Evicts uniformly at random, independently in every layer and kv head, with fresh draws at every eviction.

    EasyKV drops one index shared by all heads and layers, and in block-wise prefill one contiguous run (D-05).

    Args:
      budget: live tokens a kv head and layer.
      protect_recent: last tokens that stay; 1 keeps the newest.
      sinks: first tokens that stay.
      shared_heads: one draw for all kv heads of a layer.
      random_mode: "run" drops a contiguous run, shared by heads and layers.
    """
    one_of("random_mode", random_mode, "independent", "run")
    select = RandomRun() if random_mode == "run" else TopK()
    return Evict(
        Uniform(shared_heads), budget, protect=Protect(sinks, protect_recent), when=every_step(), select=select
    )
