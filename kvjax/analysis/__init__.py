"""Eviction measured: what a mask costs exactly, at most, and beyond the best mask in hindsight."""

from kvjax.analysis.hindsight import best_in_hindsight as best_in_hindsight
from kvjax.analysis.hindsight import future_attention as future_attention
from kvjax.analysis.hindsight import hindsight_rank as hindsight_rank
from kvjax.analysis.hindsight import lost_mass as lost_mass
from kvjax.analysis.hindsight import of_kv_heads as of_kv_heads
from kvjax.analysis.hindsight import regret as regret
from kvjax.analysis.losses import LayerLoss as LayerLoss
from kvjax.analysis.losses import Norms as Norms
from kvjax.analysis.losses import distances as distances
from kvjax.analysis.losses import eviction_bound as eviction_bound
from kvjax.analysis.losses import eviction_loss as eviction_loss
from kvjax.analysis.losses import largest_value as largest_value
from kvjax.analysis.losses import layer_loss as layer_loss
from kvjax.analysis.losses import least_bound as least_bound
from kvjax.analysis.losses import loss_bound as loss_bound
from kvjax.analysis.losses import lost_share as lost_share
