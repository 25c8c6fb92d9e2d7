"""The command line of lm-eval, where `--model kvjax` exists.

python -m kvjax.experiments.harness --model kvjax --model_args pretrained=DIR,policy=snapkv,budget=0.2 --tasks longbench

lm-eval's own command, `lm_eval`, knows no models of other packages.
"""

import importlib
import sys
from collections.abc import Sequence

from kvjax.experiments import stopping
from kvjax.experiments.core.command import as_command
from kvjax.experiments.core.compiled import read_cache_option
from kvjax.experiments.harness import lm_eval_module


@as_command
def main(argv: Sequence[str]) -> None:
    """Runs lm-eval, whose command reads `sys.argv`."""
    sys.argv[1:] = read_cache_option(argv)
    command = lm_eval_module("__main__")
    importlib.import_module("kvjax.experiments.harness.language_model")  # registers the model
    with stopping.noted(lambda: "with --use_cache FILE the same command goes on where it stopped"):
        command.cli_evaluate()


if __name__ == "__main__":
    main()
