"""Uniformly random eviction."""

from typing import Literal

from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import one_of
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Uniform
from kvjax.scoring.select import RandomRun, TopK
from kvjax.sizes.budget import Count
from kvjax.sizes.schedule import every_step


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
