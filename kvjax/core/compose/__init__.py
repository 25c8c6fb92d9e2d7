"""Policies made of policies: in turn, by layer, by kv head, one decision or one budget for all layers."""

from kvjax.core.compose.across import AcrossLayers as AcrossLayers
from kvjax.core.compose.across import across_layers as across_layers
from kvjax.core.compose.policies import ByHead as ByHead
from kvjax.core.compose.policies import Chain as Chain
from kvjax.core.compose.policies import SharedLayers as SharedLayers
from kvjax.core.compose.policies import chain as chain
from kvjax.core.compose.policies import from_fn as from_fn
from kvjax.core.compose.policies import partition as partition
from kvjax.core.compose.policies import partition_heads as partition_heads
from kvjax.core.compose.policies import shared_layers as shared_layers
from kvjax.core.compose.policies import when as when
