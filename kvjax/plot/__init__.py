"""Pictures of one's own policies: what they keep and why, what they cost against budgets, and where needles are found.

Every function returns a matplotlib `Figure`, new or that of the `axes` given. In a notebook, a figure that is the last
line of a cell is shown once `%matplotlib inline` has run. `import kvjax` does not import matplotlib; this package does.
"""

from kvjax.pallas_kernels import kinds

kinds.needs(__name__, "plot", "matplotlib")

from kvjax.plot.budgets import budget_curve as budget_curve
from kvjax.plot.depths import depth_against_length as depth_against_length
from kvjax.plot.positions import kept_positions as kept_positions
from kvjax.plot.positions import scores as scores
from kvjax.plot.style import COLOURS as COLOURS
from kvjax.plot.style import LINES as LINES
from kvjax.plot.style import MARKERS as MARKERS

kinds.doors(__name__)
