"""KV-cache eviction as small pure values under one algebra."""

import importlib
import sys
from typing import TYPE_CHECKING

if sys.argv[:1] == ["-m"]:  # `python -m kvjax.experiments.run` takes signals over before imports that take seconds
    importlib.import_module("kvjax.experiments.stopping").begin_module()

from kvjax import methods
from kvjax.across_layers import Preference, ScoreEntropy, TopScores, across_layers
from kvjax.algebra import chain, identity, partition, partition_heads, shared_layers, when
from kvjax.cache.context import Context, Site
from kvjax.cache.state import EMPTY, KVState, LayerKV, compact, evict, take_rows
from kvjax.drivers import sampling
from kvjax.drivers.attention import attend
from kvjax.drivers.beam import Beams, generate_beams, generate_beams_from
from kvjax.drivers.endless import Reader, read
from kvjax.drivers.generation import Generation, generate, generate_from
from kvjax.drivers.replay import replay
from kvjax.drivers.sampling import Categorical, Greedy, Sample
from kvjax.drivers.session import Session
from kvjax.drivers.single_layer import evict_layer
from kvjax.drivers.steps import decode_step, feed, forward, init_state, prefill
from kvjax.drivers.streaming import Stream, stream
from kvjax.eviction import Evict, from_fn
from kvjax.learning import relax
from kvjax.learning.relax import soften
from kvjax.plan import CachePlan, make_plan
from kvjax.policy import LayerSpec, Policy, Rule
from kvjax.scoring.protect import Protect
from kvjax.scoring.select import Selection
from kvjax.scoring.stats import AllRows, AttentionStats, LastRows, LayerStats, Observe, Slots
from kvjax.sharding import make_mesh, shard_params
from kvjax.sizes.allocation import (
    Adaptive,
    FloorPyramid,
    HeadTable,
    InclusivePyramid,
    LayerTable,
    Pyramid,
    UniformHeads,
    UniformLayers,
)
from kvjax.sizes.budget import Ratio, Share, Tokens
from kvjax.sizes.schedule import Schedule, after_prefill, before_append, every, every_step, when_over

__version__ = "0.1.0"
__all__ = [
    "EMPTY",
    "Adaptive",
    "AllRows",
    "AttentionStats",
    "Beams",
    "CachePlan",
    "Categorical",
    "Context",
    "Evict",
    "FloorPyramid",
    "Generation",
    "Greedy",
    "HeadTable",
    "InclusivePyramid",
    "KVState",
    "LastRows",
    "LayerKV",
    "LayerSpec",
    "LayerStats",
    "LayerTable",
    "Observe",
    "Policy",
    "Preference",
    "Protect",
    "Pyramid",
    "Ratio",
    "Reader",
    "Rule",
    "Sample",
    "Schedule",
    "ScoreEntropy",
    "Selection",
    "Session",
    "Share",
    "Site",
    "Slots",
    "Stream",
    "Tokens",
    "TopScores",
    "UniformHeads",
    "UniformLayers",
    "across_layers",
    "after_prefill",
    "attend",
    "before_append",
    "chain",
    "compact",
    "decode_step",
    "every",
    "every_step",
    "evict",
    "evict_layer",
    "feed",
    "forward",
    "from_fn",
    "generate",
    "generate_beams",
    "generate_beams_from",
    "generate_from",
    "identity",
    "init_state",
    "make_mesh",
    "make_plan",
    "methods",
    "models",
    "partition",
    "partition_heads",
    "plot",
    "prefill",
    "read",
    "relax",
    "replay",
    "sampling",
    "shard_params",
    "shared_layers",
    "soften",
    "stream",
    "take_rows",
    "when",
    "when_over",
]


if TYPE_CHECKING:
    from kvjax import models, plot
else:

    def __getattr__(name: str) -> object:
        """`kvjax.models` and `kvjax.plot`, imported when they are first used: flax and matplotlib take long."""
        if name in ("models", "plot"):
            return importlib.import_module(f"kvjax.{name}")
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
