"""`Evict`, and policies made of policies: in turn, by layer, by kv head, one decision or one budget for all layers."""

from kvjax.compose.across import AcrossLayers as AcrossLayers
from kvjax.compose.across import SharedLayers as SharedLayers
from kvjax.compose.across import across_layers as across_layers
from kvjax.compose.across import shared_layers as shared_layers
from kvjax.compose.around import Coded as Coded
from kvjax.compose.around import coded as coded
from kvjax.compose.policies import ByHead as ByHead
from kvjax.compose.policies import Chain as Chain
from kvjax.compose.policies import chain as chain
from kvjax.compose.policies import from_fn as from_fn
from kvjax.compose.policies import partition as partition
from kvjax.compose.policies import partition_heads as partition_heads
from kvjax.compose.policies import protect as protect
from kvjax.compose.policies import shared_heads as shared_heads
from kvjax.compose.policies import when as when
