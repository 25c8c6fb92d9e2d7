"""Eviction measured: the exact cost of a mask, its bounds, the best in hindsight, and losses of the model's output."""

from kvjax.analysis.curves import Curves as Curves
from kvjax.analysis.curves import Losses as Losses
from kvjax.analysis.curves import curves as curves
from kvjax.analysis.curves import mask_losses as mask_losses
from kvjax.analysis.curves import value_bounds as value_bounds
from kvjax.analysis.hindsight import best_in_hindsight as best_in_hindsight
from kvjax.analysis.hindsight import future_attention as future_attention
from kvjax.analysis.hindsight import hindsight_rank as hindsight_rank
from kvjax.analysis.hindsight import lost_mass as lost_mass
from kvjax.analysis.hindsight import of_kv_heads as of_kv_heads
from kvjax.analysis.hindsight import regret as regret
from kvjax.analysis.intervals import Interval as Interval
from kvjax.analysis.intervals import interval as interval
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
from kvjax.analysis.losses import output_kl as output_kl
from kvjax.analysis.losses import task_loss as task_loss
from kvjax.analysis.reading import Reading as Reading
from kvjax.analysis.reading import read as read
from kvjax.analysis.traces import Traces as Traces
from kvjax.analysis.traces import Voters as Voters
from kvjax.analysis.traces import VotingRows as VotingRows
from kvjax.analysis.traces import trace as trace
from kvjax.pallas_kernels import kinds
from kvjax.run.prefill_each import Stored as Stored

kinds.doors(__name__)
