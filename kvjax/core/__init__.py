"""KV-cache eviction policies in JAX. Each module is built on those named before it.

contract: what a policy is asked and told. storage: what is stored. budgets: how many tokens. observe: what can be seen
of a layer's rows. scores: how tokens are ranked. decide: which stay, and what they hold. evict: what most methods are.
compose, across: policies made of policies. plan: sizes. drivers: a model that decodes. methods: the papers.
"""

from kvjax.core.across import across_layers as across_layers
from kvjax.core.budgets import Adaptive as Adaptive
from kvjax.core.budgets import Pyramid as Pyramid
from kvjax.core.budgets import Share as Share
from kvjax.core.compose import chain as chain
from kvjax.core.compose import from_fn as from_fn
from kvjax.core.compose import partition as partition
from kvjax.core.compose import partition_heads as partition_heads
from kvjax.core.compose import shared_layers as shared_layers
from kvjax.core.compose import when as when
from kvjax.core.contract import Policy as Policy
from kvjax.core.drivers.door import forward as forward
from kvjax.core.drivers.generation import generate as generate
from kvjax.core.drivers.steps import decode_step as decode_step
from kvjax.core.drivers.steps import prefill as prefill
from kvjax.core.drivers.steps import start as start
from kvjax.core.evict import Evict as Evict
from kvjax.core.plan import init_policy_params as init_policy_params
from kvjax.core.plan import make_plan as make_plan
