"""Attention over KV caches, and the statistics that eviction policies read from it."""

from kvjax.pallas_kernels import kinds
from kvjax.pallas_kernels.api import attention as attention
from kvjax.pallas_kernels.api import pooled_attention as pooled_attention
from kvjax.pallas_kernels.api import recovered_attention as recovered_attention
from kvjax.pallas_kernels.api import use as use
from kvjax.pallas_kernels.columns import Attention as Attention
from kvjax.pallas_kernels.columns import Columns as Columns
from kvjax.pallas_kernels.columns import Recovery as Recovery
from kvjax.pallas_kernels.columns import Softmax as Softmax
from kvjax.pallas_kernels.columns import hash_uniform as hash_uniform
from kvjax.pallas_kernels.logits import Logits as Logits

kinds.doors(__name__, "attention", "pooled_attention", "recovered_attention", "use")
