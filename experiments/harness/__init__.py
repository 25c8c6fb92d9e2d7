"""kvjax inside lm-eval: a model of its registry, its command line, and LongBench's local files as its tasks."""

import importlib
import types


def lm_eval_module(name: str) -> types.ModuleType:
    """A module of lm-eval.

    Raises:
      ValueError: it is not installed.
    """
    try:
        return importlib.import_module(f"lm_eval.{name}")
    except ImportError as e:
        raise ValueError(f"lm-eval cannot be imported ({e}); pip install 'kvjax[eval]'") from e
