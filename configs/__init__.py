"""One file a method: `get_config(budget=..., ...) -> Experiment`. The signature is the command line."""

from kvjax.configs.experiment import Experiment as Experiment
from kvjax.configs.experiment import Setup as Setup
from kvjax.configs.loading import available as available
from kvjax.configs.loading import find as find
