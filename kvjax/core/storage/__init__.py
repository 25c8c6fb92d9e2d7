"""What a layer stores. A storage has `view`, `put`, `append`, `attend`, `compact`, `take`, `where`, `nbytes`."""

from kvjax.core.storage.layer import Layer as Layer
from kvjax.core.storage.layer import empty as empty
from kvjax.core.storage.layer import in_order as in_order
from kvjax.core.storage.layer import take as take
from kvjax.core.storage.pool import Pool as Pool
