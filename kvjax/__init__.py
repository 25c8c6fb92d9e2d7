"""KV-cache eviction policies for language models: what a cache keeps, decided by small immutable values.

Each package is built on those named before it:

- `kvjax.contract`: what a policy and its parts are given and return.
- `kvjax.codecs`: fewer bits for stored keys and values.
- `kvjax.storage`: a layer's cache.
- `kvjax.budgets`: how many tokens each layer and head keeps.
- `kvjax.observe`: what a policy can ask to know of the rows that a layer reads.
- `kvjax.decide`: which tokens stay, and what is stored of them.
- `kvjax.scores`: how tokens are ranked.
- `kvjax.compose`: `Evict`, the policy that most methods are, and policies made of policies.
- `kvjax.run`: a model under a policy: reading prompts, a token at a time, evicting; sizes, bytes, meshes, programs.
- `kvjax.generation`: tokens one after another: the loop, samplers, beams.
- `kvjax.text`: text in, text out: sessions, streams, and files of both. What is public in these three can be imported
  from here.
- `kvjax.methods`: the methods of the papers.
- `kvjax.analysis`: what an eviction costs.
- `kvjax.learning`: differentiable policies, and scores and gates that are fitted.
- `kvjax.plot`: pictures.

Two are beside them: `kvjax.models`, language models and their checkpoints, and `kvjax.pallas_kernels`, attention and
its statistics.
"""

import importlib
from typing import TYPE_CHECKING

from kvjax import codecs, methods
from kvjax.budgets import Adaptive, Pyramid, Share
from kvjax.compose import chain, coded, from_fn, partition, partition_heads, protect, shared_heads, shared_layers, when
from kvjax.compose.across import across_layers
from kvjax.compose.evict import Evict
from kvjax.contract import Policy, doors
from kvjax.generation import sampling
from kvjax.generation.beams import generate_beams, generate_beams_from
from kvjax.generation.generate import feed, generate, generate_from, score
from kvjax.generation.sampling import Categorical, Greedy, Sample
from kvjax.run.compiled import keep_compiled
from kvjax.run.evict_layer import evict_layer
from kvjax.run.forward import forward
from kvjax.run.memory import plan_memory
from kvjax.run.mesh import make_mesh, shard_params
from kvjax.run.plan import Plan, init_policy_params, make_plan
from kvjax.run.prefill_each import prefill_each
from kvjax.run.state import AttnStats, State
from kvjax.run.steps import decode_step, prefill, start
from kvjax.text.files import load_state, save_state
from kvjax.text.read import read
from kvjax.text.session import Session
from kvjax.text.stream import stream

__version__ = "0.2.0"
__all__ = [
    "Adaptive",
    "AttnStats",
    "Categorical",
    "Evict",
    "Greedy",
    "Plan",
    "Policy",
    "Pyramid",
    "Sample",
    "Session",
    "Share",
    "State",
    "across_layers",
    "chain",
    "codecs",
    "coded",
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
    "keep_compiled",
    "load_state",
    "make_mesh",
    "make_plan",
    "methods",
    "models",
    "partition",
    "partition_heads",
    "plan_memory",
    "plot",
    "prefill",
    "prefill_each",
    "protect",
    "read",
    "sampling",
    "save_state",
    "score",
    "shard_params",
    "shared_heads",
    "shared_layers",
    "start",
    "stream",
    "when",
]

doors(__name__, *__all__)


if TYPE_CHECKING:
    from kvjax import models, plot
else:

    def __getattr__(name: str) -> object:
        """`kvjax.models` and `kvjax.plot`, imported when they are first used: flax and matplotlib take long."""
        if name in ("models", "plot"):
            return importlib.import_module(f"kvjax.{name}")
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
