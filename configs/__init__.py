"""One file a method: `get_config(budget=..., ...) -> Experiment`. The signature is the command line."""

from configs.experiment import Experiment as Experiment
from configs.experiment import Setup as Setup
from configs.loading import available as available
from configs.loading import find as find
