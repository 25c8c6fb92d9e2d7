"""KV-cache eviction as small pure values under one algebra."""

import importlib
from typing import TYPE_CHECKING

from kvjax import methods as methods
from kvjax._moved import MOVED, moved
from kvjax.across_layers import Preference as Preference
from kvjax.across_layers import ScoreEntropy as ScoreEntropy
from kvjax.across_layers import TopScores as TopScores
from kvjax.across_layers import across_layers as across_layers
from kvjax.algebra import chain as chain
from kvjax.algebra import identity as identity
from kvjax.algebra import partition as partition
from kvjax.algebra import partition_heads as partition_heads
from kvjax.algebra import shared_layers as shared_layers
from kvjax.algebra import when as when
from kvjax.cache.context import Context as Context
from kvjax.cache.context import Site as Site
from kvjax.cache.state import EMPTY as EMPTY
from kvjax.cache.state import KVState as KVState
from kvjax.cache.state import LayerKV as LayerKV
from kvjax.cache.state import compact as compact
from kvjax.cache.state import evict as evict
from kvjax.cache.state import take_rows as take_rows
from kvjax.drivers import sampling as sampling
from kvjax.drivers.attention import attend as attend
from kvjax.drivers.beam import Beams as Beams
from kvjax.drivers.beam import generate_beams as generate_beams
from kvjax.drivers.beam import generate_beams_from as generate_beams_from
from kvjax.drivers.endless import Reader as Reader
from kvjax.drivers.endless import read as read
from kvjax.drivers.generation import Generation as Generation
from kvjax.drivers.generation import generate as generate
from kvjax.drivers.generation import generate_from as generate_from
from kvjax.drivers.replay import replay as replay
from kvjax.drivers.sampling import Categorical as Categorical
from kvjax.drivers.sampling import Greedy as Greedy
from kvjax.drivers.sampling import Sample as Sample
from kvjax.drivers.session import Session as Session
from kvjax.drivers.single_layer import evict_layer as evict_layer
from kvjax.drivers.steps import decode_step as decode_step
from kvjax.drivers.steps import feed as feed
from kvjax.drivers.steps import forward as forward
from kvjax.drivers.steps import init_state as init_state
from kvjax.drivers.steps import prefill as prefill
from kvjax.drivers.streaming import Stream as Stream
from kvjax.drivers.streaming import stream as stream
from kvjax.eviction import Evict as Evict
from kvjax.eviction import from_fn as from_fn
from kvjax.learning import relax as relax
from kvjax.learning.relax import soften as soften
from kvjax.plan import CachePlan as CachePlan
from kvjax.plan import make_plan as make_plan
from kvjax.policy import LayerSpec as LayerSpec
from kvjax.policy import Policy as Policy
from kvjax.policy import Rule as Rule
from kvjax.scoring.protect import Protect as Protect
from kvjax.scoring.select import Selection as Selection
from kvjax.scoring.stats import AllRows as AllRows
from kvjax.scoring.stats import AttentionStats as AttentionStats
from kvjax.scoring.stats import LastRows as LastRows
from kvjax.scoring.stats import LayerStats as LayerStats
from kvjax.scoring.stats import Observe as Observe
from kvjax.scoring.stats import Slots as Slots
from kvjax.sharding import make_mesh as make_mesh
from kvjax.sharding import shard_params as shard_params
from kvjax.sizes.allocation import Adaptive as Adaptive
from kvjax.sizes.allocation import FloorPyramid as FloorPyramid
from kvjax.sizes.allocation import HeadTable as HeadTable
from kvjax.sizes.allocation import InclusivePyramid as InclusivePyramid
from kvjax.sizes.allocation import LayerTable as LayerTable
from kvjax.sizes.allocation import Pyramid as Pyramid
from kvjax.sizes.allocation import UniformHeads as UniformHeads
from kvjax.sizes.allocation import UniformLayers as UniformLayers
from kvjax.sizes.budget import Ratio as Ratio
from kvjax.sizes.budget import Share as Share
from kvjax.sizes.budget import Tokens as Tokens
from kvjax.sizes.schedule import Schedule as Schedule
from kvjax.sizes.schedule import after_prefill as after_prefill
from kvjax.sizes.schedule import before_append as before_append
from kvjax.sizes.schedule import every as every
from kvjax.sizes.schedule import every_step as every_step
from kvjax.sizes.schedule import when_over as when_over

if TYPE_CHECKING:
    from kvjax import plot as plot


def __getattr__(name: str) -> object:
    """`kvjax.plot`, whose matplotlib takes long to import; modules by the names that they had before they got rooms."""
    if name == "plot":
        return importlib.import_module("kvjax.plot")
    if name in MOVED:
        return moved(name)
    raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
