"""Finding configs by name or path."""

import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any, Final

_HERE = pathlib.Path(__file__).parent
_NOT_CONFIGS = {"__init__", "experiment", "learning", "loading"}
_SCRIPTS: Final = {"learned_budget": "learn_budget.py", "learned_scorer": "learn_scorer.py"}


def available(script: str = "run.py") -> list[str]:
    """The configs that come with the project for a script in experiments/."""
    stems = (p.stem for p in _HERE.glob("*.py") if p.stem not in _NOT_CONFIGS)
    return sorted(s for s in stems if _SCRIPTS.get(s, "run.py") == script)


def find(config: str, script: str = "run.py") -> tuple[str, Callable[..., Any]]:
    """The name and the `get_config` of a config.

    Args:
      config: "snapkv.py" or "snapkv" for a file here, or a path to another file.
      script: which script in experiments/ asks.

    Raises:
      ValueError: no such config, naming those that exist; one for another script; or a file without `get_config`.
    """
    path = pathlib.Path(config)
    stem = path.stem if path.suffix == ".py" else path.name
    here = path.parent == pathlib.Path(".")
    if here and stem in available(script):
        path = _HERE / f"{stem}.py"
    elif here and stem in _SCRIPTS:
        raise ValueError(f"{stem}.py is a config of experiments/{_SCRIPTS[stem]}, not of experiments/{script}")
    if path.suffix != ".py" or not path.is_file():
        names = ", ".join(available(script))
        raise ValueError(f"no config {config!r}; configs/ has {names}, or give a path to a .py file")
    spec = importlib.util.spec_from_file_location(f"configs.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if get_config is None:
        raise ValueError(f"{path} defines no get_config(budget=..., ...) -> Experiment")
    return path.stem, get_config
