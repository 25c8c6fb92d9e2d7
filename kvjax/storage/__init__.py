"""A layer's cache: equally many slots for every head (`Layer`), or one pool of slots for all heads (`Pool`)."""

from kvjax.storage.layer import Layer as Layer
from kvjax.storage.layer import empty as empty
from kvjax.storage.layer import in_order as in_order
from kvjax.storage.layer import take as take
from kvjax.storage.pool import Pool as Pool
from kvjax.storage.pool import to_pool as to_pool
from kvjax.storage.protocol import Storage as Storage
