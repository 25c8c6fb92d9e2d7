"""Names that something had before: they still find it, and warn."""

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

ROOMS = {
    "cache": "state pool context",
    "sizes": "budget allocation schedule",
    "scoring": "stats measurements scores key_scores learned select protect",
    "drivers": "generation beam attention single_layer sampling checkpoint",
    "methods": "simulations token_classes",
    "analysis": "traces",
    "learning": "relax families",
}
MOVED = {name: f"kvjax.{room}.{name}" for room, names in ROOMS.items() for name in names.split()}
MOVED |= {"fastgen": "kvjax.methods.profiling", "choice": "pallas_kernels.values"}


def moved(name: str) -> types.ModuleType:
    """The module that was `kvjax.{name}`, with a warning that says where it is now."""
    message = f"kvjax.{name} is {MOVED[name]} now; the old name will go"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return importlib.import_module(MOVED[name])


def elsewhere(module: str, now: str, names: Sequence[str] | Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` for names that are in another one now, or have another name.

    Args:
      module: the full name of the module that they were in.
      now: the module of kvjax that they are in.
      names: what moved; from the old name to the new one where they differ.
    """
    found_as = dict(names) if isinstance(names, Mapping) else {name: name for name in names}

    def found(name: str) -> Any:
        if name not in found_as:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = found_as[name]
        warnings.warn(f"{module}.{name} is kvjax.{now}.{new} now", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(f"kvjax.{now}"), new)

    return found


def renamed(**options: str) -> Callable[[F], F]:
    """A function that still takes keyword arguments by their old names, with a warning.

    Args:
      **options: old name to new name.
    """

    def rename(function: F) -> F:
        @functools.wraps(function)
        def with_old_names(*args: Any, **given: Any) -> Any:
            for old in options.keys() & given.keys():
                new, name = options[old], function.__name__
                if new in given:
                    raise ValueError(f"{name}: {old} is {new} now, but both were given; give {new}= alone")
                warnings.warn(f"{name}({old}=...) is {name}({new}=...) now", DeprecationWarning, stacklevel=2)
                given[new] = given.pop(old)
            return function(*args, **given)

        return with_old_names  # type: ignore[return-value]

    return rename


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under their old names."""

    def find_spec(
        self, fullname: str, path: Any, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for an old name, None for all others."""
        del path, target
        package, _, name = fullname.partition(".")
        return importlib.machinery.ModuleSpec(fullname, self) if package == "kvjax" and name in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The module itself, not a copy: its classes are the same under both names."""
        module = moved(spec.name.partition(".")[2])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """It has run under its own name, and keeps that."""
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


if not any(type(finder).__name__ == "_Finder" for finder in sys.meta_path):
    sys.meta_path.append(_Finder())
