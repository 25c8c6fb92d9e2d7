"""KV-cache eviction policies in JAX, rebuilt on one contract; the rest of kvjax does not use them yet.

Each module is built on those named before it.

contract: what a policy is asked and told. storage: what is stored. budgets: how many tokens. observe: what can be seen
of a layer's rows. scores: how tokens are ranked. decide: which stay, and what they hold. evict: what most methods are.
compose: policies made of policies. plan: sizes. drivers: a model that decodes. methods: the papers.
analysis: losses of an eviction, from one prefill. plot: pictures.
"""

import importlib
from typing import TYPE_CHECKING

from kvjax.core.budgets import Adaptive, Pyramid, Share
from kvjax.core.compose import chain, from_fn, partition, partition_heads, shared_layers, when
from kvjax.core.compose.across import across_layers
from kvjax.core.contract import Policy
from kvjax.core.drivers import sampling
from kvjax.core.drivers.beam import Beams, generate_beams, generate_beams_from
from kvjax.core.drivers.checkpoint import load_state, save_state
from kvjax.core.drivers.door import forward
from kvjax.core.drivers.generation import Generation, feed, generate, generate_from, score
from kvjax.core.drivers.memory import Memory, plan_memory
from kvjax.core.drivers.mesh import make_mesh, shard_params
from kvjax.core.drivers.reader import Reader, read
from kvjax.core.drivers.sampling import Categorical, Greedy, Sample
from kvjax.core.drivers.session import Session
from kvjax.core.drivers.single import evict_layer
from kvjax.core.drivers.state import AttnStats, State
from kvjax.core.drivers.steps import decode_step, prefill, start
from kvjax.core.drivers.stream import Stream, stream
from kvjax.core.evict import Evict
from kvjax.core.plan import Plan, init_policy_params, make_plan

__all__ = [
    "Adaptive",
    "AttnStats",
    "Beams",
    "Categorical",
    "Evict",
    "Generation",
    "Greedy",
    "Memory",
    "Plan",
    "Policy",
    "Pyramid",
    "Reader",
    "Sample",
    "Session",
    "Share",
    "State",
    "Stream",
    "across_layers",
    "chain",
    "decode_step",
    "evict_layer",
    "feed",
    "forward",
    "from_fn",
    "generate",
    "generate_beams",
    "generate_beams_from",
    "generate_from",
    "init_policy_params",
    "load_state",
    "make_mesh",
    "make_plan",
    "partition",
    "partition_heads",
    "plan_memory",
    "plot",
    "prefill",
    "read",
    "sampling",
    "save_state",
    "score",
    "shard_params",
    "shared_layers",
    "start",
    "stream",
    "when",
]

if TYPE_CHECKING:
    from kvjax.core import plot
else:

    def __getattr__(name: str) -> object:
        """`kvjax.plot`, imported when it is first used: matplotlib takes long."""
        if name == "plot":
            return importlib.import_module("kvjax.core.plot")
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
