"""The contract: policies, their parts and their arguments. All other modules build on it.

Letters in shapes: B sequences, T rows (new tokens), S slots, N query heads, K kv heads, G = N / K, H head_dim, D width
of the model, M prompts that are planned for on the host.
"""

from kvjax.contract.model import Attend as Attend
from kvjax.contract.model import Config as Config
from kvjax.contract.model import KVShape as KVShape
from kvjax.contract.model import Model as Model
from kvjax.contract.model import Positions as Positions
from kvjax.contract.model import Tokenizer as Tokenizer
from kvjax.contract.model import kv_layers as kv_layers
from kvjax.contract.model import kv_shape as kv_shape
from kvjax.contract.policy import Heads as Heads
from kvjax.contract.policy import Part as Part
from kvjax.contract.policy import Policy as Policy
from kvjax.contract.policy import Rewrite as Rewrite
from kvjax.contract.policy import Score as Score
from kvjax.contract.policy import Select as Select
from kvjax.contract.policy import children as children
from kvjax.contract.policy import of_parts as of_parts
from kvjax.contract.policy import resolved as resolved
from kvjax.contract.policy import unique as unique
from kvjax.contract.policy import updated_parts as updated_parts
from kvjax.contract.types import EMPTY as EMPTY
from kvjax.contract.types import LAST as LAST
from kvjax.contract.types import AttentionInputs as AttentionInputs
from kvjax.contract.types import Context as Context
from kvjax.contract.types import Decision as Decision
from kvjax.contract.types import Ids as Ids
from kvjax.contract.types import LayerInfo as LayerInfo
from kvjax.contract.types import LayerView as LayerView
from kvjax.contract.types import Layout as Layout
from kvjax.contract.types import Observation as Observation
from kvjax.contract.types import PerHead as PerHead
from kvjax.contract.types import PerSlot as PerSlot
from kvjax.contract.types import Phase as Phase
from kvjax.contract.types import Reads as Reads
from kvjax.contract.types import Rotate as Rotate
from kvjax.contract.types import Sizes as Sizes
from kvjax.contract.types import Slots as Slots
from kvjax.contract.types import Stats as Stats
from kvjax.contract.types import turned_queries as turned_queries
from kvjax.contract.values import Count as Count
from kvjax.contract.values import FrozenArrays as FrozenArrays
from kvjax.contract.values import Prompts as Prompts
from kvjax.contract.values import Tree as Tree
from kvjax.contract.values import Value as Value
from kvjax.contract.values import compiled as compiled
from kvjax.contract.values import count as count
from kvjax.contract.values import data as data
from kvjax.contract.values import place as place
from kvjax.contract.values import resolve as resolve
from kvjax.contract.values import value as value
from kvjax.pallas_kernels.kinds import MOST as MOST
from kvjax.pallas_kernels.kinds import Amount as Amount
from kvjax.pallas_kernels.kinds import AtLeastOne as AtLeastOne
from kvjax.pallas_kernels.kinds import Cosine as Cosine
from kvjax.pallas_kernels.kinds import LayerParams as LayerParams
from kvjax.pallas_kernels.kinds import NonNegative as NonNegative
from kvjax.pallas_kernels.kinds import Odd as Odd
from kvjax.pallas_kernels.kinds import Positive as Positive
from kvjax.pallas_kernels.kinds import PRNGKey as PRNGKey
from kvjax.pallas_kernels.kinds import Proportion as Proportion
from kvjax.pallas_kernels.kinds import Ratio as Ratio
from kvjax.pallas_kernels.kinds import Size as Size
from kvjax.pallas_kernels.kinds import doors as doors
