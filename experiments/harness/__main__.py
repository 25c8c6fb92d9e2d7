"""The command line of lm-eval, where `--model kvjax` exists.

python -m experiments.harness --model kvjax --model_args pretrained=DIR,policy=snapkv,budget=0.2 --tasks longbench
"""

from lm_eval.__main__ import cli_evaluate

import experiments.harness  # noqa: F401 - registers the model
from experiments.evaluation.results import plain_errors

if __name__ == "__main__":
    with plain_errors():
        cli_evaluate()
