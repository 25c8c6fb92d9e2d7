"""What `experiments/probe.py` has found of a model, and what is published for it."""

import pathlib
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax import models
from kvjax.configs.experiment import Common
from kvjax.contract import FrozenArrays
from kvjax.methods.published import published


def probed(setup: Common, given: str, name: str, how: str = "") -> np.ndarray:
    """An array of a model: of the file that is given, what is published for it, or the one beside its weights.

    Args:
      setup: names the model.
      given: a file, which is one of `published` if it ends in .tsv or .json, or nothing.
      name: what `experiments/probe.py` calls it.
      how: what to do where there is none, if not `experiments/probe.py`.

    Raises:
      ValueError: there is none, or it is no array of finite numbers, or one of another model.
    """
    if pathlib.Path(given).suffix in (".tsv", ".json"):
        return published(given, models.read_config(setup.source))
    file, found = _loaded(setup, given, name, "npy", how)
    if not isinstance(found, np.ndarray):
        raise ValueError(f"{file} has {len(found)} arrays, but {name} are one; give what was found of {name}")
    _check_finite(file, {name: found})
    check_heads(setup, file, found)
    return found


def check_heads(setup: Common, file: str | pathlib.Path, found: np.ndarray, axes: int = 2) -> None:
    """Tries whether the first axes of an array are the model's layers and kv heads, or its layers, if one counts.

    Raises:
      ValueError: they are not, with both shapes.
    """
    config = models.read_config(setup.source)
    if found.shape[:axes] != (config.num_layers, config.num_kv_heads)[:axes]:
        raise ValueError(
            f"{file} is of shape {found.shape}, but {setup.model} has {config.num_layers} layers of "
            f"{config.num_kv_heads} kv heads; give what was found of this model"
        )


def probed_arrays(setup: Common, given: str, name: str) -> FrozenArrays:
    """Several arrays of a model by their names, likewise.

    Args:
      setup: names the model.
      given: a file, or nothing.
      name: what `experiments/probe.py` calls them.

    Raises:
      ValueError: there are none, it is one array without a name, or they are of a model with other layers.
    """
    file, found = _loaded(setup, given, name, "npz", "")
    if isinstance(found, np.ndarray):
        raise ValueError(f"{file} has one array of the shape {found.shape}; give what probe.py {name} wrote")
    _check_finite(file, found)
    for x in found.values():
        check_heads(setup, file, x, axes=1)
    return FrozenArrays(found)


def _check_finite(file: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    for name, x in arrays.items():
        if x.dtype.kind != "f" or not np.isfinite(x).all():
            raise ValueError(f"{file} has {name!r} of {x.dtype} that are no finite floats; find them anew")


def _loaded(setup: Common, given: str, name: str, kind: str, how: str) -> tuple[pathlib.Path, Any]:
    """The file, and its array or its arrays by name."""
    file = pathlib.Path(given) if given else pathlib.Path(setup.source) / f"{name}.{kind}"
    if not file.is_file():
        probe = f"python experiments/probe.py {name} --model {setup.model} --output {name}.{kind}"
        raise ValueError(f"there is no {file}; {how or f'make one: {probe}, and give it as an option'}")
    try:
        found = np.load(file, allow_pickle=False)
        return file, found if isinstance(found, np.ndarray) else {key: found[key] for key in found}
    except (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as e:
        raise ValueError(f"{file} is no file of numpy's arrays: {e}") from e
