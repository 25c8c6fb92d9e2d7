"""What `experiments/run.py --config` runs: a method of the table in `methods`, or the `get_config` of a file."""

from kvjax.pallas_kernels.kinds import needs

needs(__name__, "experiments", "tyro")

from kvjax.configs.experiment import Experiment as Experiment
from kvjax.configs.experiment import Setup as Setup
from kvjax.configs.loading import available as available
from kvjax.configs.loading import find as find
