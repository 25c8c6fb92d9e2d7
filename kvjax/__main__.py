"""The command `kvjax`, or `python -m kvjax`: names what can be run, and runs it."""

import difflib
import importlib
import sys
from typing import Final

COMMANDS: Final = {
    "run": "one method beside the full cache and others: --config snapkv.py",
    "report": "tables and pictures of runs: results/snapkv",
    "board": "every method at equal bytes, with intervals: --model varied",
    "sweep": "a grid of runs, here or on a cluster: --config snapkv.py h2o.py --budget 0.1 0.2",
    "learn": "budgets, scores and gates by gradient: budget --config learned_budget.py",
    "probe": "what some methods must know of a model: heads --model DIR",
    "reproduce": "the papers' tables: --list",
    "replication": "the papers' claims, one by one: --models embedded",
    "findings": "what decides, how far from hindsight, what is lost: what_decides",
    "figures": "the papers' figures: --help",
    "train": "the models that come with the project: embedded",
}


def main() -> None:
    """Runs the command that the first argument names, with those that follow."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: kvjax COMMAND [OPTIONS], each with --help\n")
        print("\n".join(f"  {command:{width}}  {about}" for command, about in COMMANDS.items()))
    elif name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        raise SystemExit(f"error: there is no command {name!r}; {f'is it {near[0]}?' if near else 'kvjax lists them'}")
    else:
        try:
            importlib.import_module("kvjax.experiments.stopping").begin()  # before imports that take seconds
        except ImportError as e:
            raise SystemExit(f"error: {e}") from e
        importlib.import_module(f"kvjax.experiments.{name}").main(arguments)


if __name__ == "__main__":
    main()
