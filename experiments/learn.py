"""Learns what a policy is made of by gradient, and measures what that is worth on other prompts.

    python experiments/learn.py budget --config learned_budget.py   # how a budget is divided over layers and heads
    python experiments/learn.py scorer --config learned_scorer.py   # a score: which tokens later rows will look at
    python experiments/learn.py gates                               # DuoAttention's gates: which heads may stream

Each has a --help. What is interrupted goes on with the same command.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from kvjax.experiments.core.command import as_command, typed
from kvjax.experiments.core.compiled import HELP, read_cache_option
from kvjax.experiments.run import check_apart, default_directory, parse

CONFIGURED = ("budget", "scorer")  # by files in configs/
WHAT = (*CONFIGURED, "gates")


def run_config(script: str, run: Callable[..., str], argv: Sequence[str]) -> None:
    """Runs a config in its directory, and prints the report."""
    experiment, own, overrides = parse(argv, script)
    directory = own.output or default_directory(own, overrides, script)
    check_apart(directory, own, experiment.prompts.source)
    print(run(experiment, directory, [sys.executable, *sys.argv], restart=own.restart))
    print(f"written to {directory}")


@as_command
def main(argv: Sequence[str]) -> None:
    """Does what the first argument names, with the options that follow."""
    argv = read_cache_option(argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: {typed('learn')} {{{','.join(WHAT)}}} [OPTIONS]\n\n{__doc__}\n{HELP}")
        return
    what, *options = argv
    if what not in WHAT:
        raise ValueError(f"nothing is learned by the name {what!r}; there are {', '.join(WHAT)}")
    module: Any = importlib.import_module(f"kvjax.experiments.learning.{what}")
    if what in CONFIGURED:
        run_config(f"learn {what}", module.run, options)
    else:
        tyro.cli(module.run, args=options, prog=typed(f"learn {what}"), description=module.__doc__)


if __name__ == "__main__":
    main()
