"""The contract: what a policy is asked and what it is told. All other modules build on it.

Letters in shapes: B sequences, T rows (new tokens), S slots, N query heads, K kv heads, G = N / K, H head_dim, D width
of the model, M prompts that are planned for on the host.
"""

from kvjax.core.contract.asked import Heads as Heads
from kvjax.core.contract.asked import Part as Part
from kvjax.core.contract.asked import Policy as Policy
from kvjax.core.contract.asked import Rewrite as Rewrite
from kvjax.core.contract.asked import Score as Score
from kvjax.core.contract.asked import Select as Select
from kvjax.core.contract.asked import children as children
from kvjax.core.contract.asked import of_parts as of_parts
from kvjax.core.contract.asked import resolved as resolved
from kvjax.core.contract.asked import unique as unique
from kvjax.core.contract.asked import updated_parts as updated_parts
from kvjax.core.contract.told import EMPTY as EMPTY
from kvjax.core.contract.told import LAST as LAST
from kvjax.core.contract.told import UNSCORED as UNSCORED
from kvjax.core.contract.told import AttentionInputs as AttentionInputs
from kvjax.core.contract.told import Context as Context
from kvjax.core.contract.told import Decision as Decision
from kvjax.core.contract.told import LayerInfo as LayerInfo
from kvjax.core.contract.told import LayerView as LayerView
from kvjax.core.contract.told import Layout as Layout
from kvjax.core.contract.told import Observation as Observation
from kvjax.core.contract.told import PerHead as PerHead
from kvjax.core.contract.told import PerSlot as PerSlot
from kvjax.core.contract.told import Phase as Phase
from kvjax.core.contract.told import Reads as Reads
from kvjax.core.contract.told import Rotate as Rotate
from kvjax.core.contract.told import Sizes as Sizes
from kvjax.core.contract.told import Slots as Slots
from kvjax.core.contract.told import Stats as Stats
from kvjax.core.contract.values import MOST as MOST
from kvjax.core.contract.values import Count as Count
from kvjax.core.contract.values import FrozenArrays as FrozenArrays
from kvjax.core.contract.values import Prompts as Prompts
from kvjax.core.contract.values import Tree as Tree
from kvjax.core.contract.values import Value as Value
from kvjax.core.contract.values import compiled as compiled
from kvjax.core.contract.values import count as count
from kvjax.core.contract.values import data as data
from kvjax.core.contract.values import resolve as resolve
from kvjax.core.contract.values import value as value
