"""kvjax inside lm-eval: a model of its registry, its command line, and LongBench's local files as its tasks."""

import types

from kvjax.experiments.core.command import imported


def lm_eval_module(name: str) -> types.ModuleType:
    """A module of lm-eval.

    Raises:
      ValueError: it is not installed.
    """
    return imported(f"lm_eval.{name}", "eval")
