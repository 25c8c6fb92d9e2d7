"""kvjax as a model of lm-eval: importing this registers it, so that `lm_eval.simple_evaluate(model="kvjax")` finds it.

lm-eval has no way to name a model of another package on its command line, so `python -m experiments.harness` takes the
place of `lm_eval`: the same arguments, and "kvjax" among the models.
"""

try:
    import lm_eval as _installed  # noqa: F401
except ImportError as e:
    raise ImportError("the benchmarks of lm-eval need the package lm-eval: pip install 'kvjax[eval]'") from e

from experiments.harness.language_model import HarnessModel as HarnessModel
