"""Finding configs by name or path."""

import importlib.util
import pathlib
from collections.abc import Callable

from configs.experiment import Experiment

_HERE = pathlib.Path(__file__).parent
_NOT_CONFIGS = {"__init__", "experiment", "loading"}


def available() -> list[str]:
    """The configs that come with the project."""
    return sorted(p.stem for p in _HERE.glob("*.py") if p.stem not in _NOT_CONFIGS)


def find(config: str) -> tuple[str, Callable[..., Experiment]]:
    """The name and the `get_config` of a config.

    Args:
      config: "snapkv.py" or "snapkv" for a file here, or a path to another file.

    Raises:
      ValueError: no such config, naming those that exist; or a file without `get_config`.
    """
    path = pathlib.Path(config)
    stem = path.stem if path.suffix == ".py" else path.name
    if path.parent == pathlib.Path(".") and stem in available():
        path = _HERE / f"{stem}.py"
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"no config {config!r}; configs/ has {', '.join(available())}, or give a path to a .py file")
    spec = importlib.util.spec_from_file_location(f"configs.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if get_config is None:
        raise ValueError(f"{path} defines no get_config(budget=..., ...) -> Experiment")
    return path.stem, get_config
