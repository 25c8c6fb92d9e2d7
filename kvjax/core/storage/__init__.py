"""What a layer stores: as many slots for every head (`Layer`), or one pool of slots for all heads (`Pool`)."""

from kvjax.core.storage.layer import Layer as Layer
from kvjax.core.storage.layer import empty as empty
from kvjax.core.storage.layer import in_order as in_order
from kvjax.core.storage.layer import linear_bias as linear_bias
from kvjax.core.storage.layer import take as take
from kvjax.core.storage.pool import Pool as Pool
from kvjax.core.storage.pool import to_pool as to_pool
from kvjax.core.storage.protocol import Storage as Storage
