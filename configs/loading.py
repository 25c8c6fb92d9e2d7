"""Finding configs by name or path, and functions in Python files."""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import inspect
import pathlib
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from kvjax.configs.methods import CONFIGS

_HERE = pathlib.Path(__file__).parent
_SCRIPTS: Final = {"learned_budget": "learn budget", "learned_scorer": "learn scorer"}


def available(script: str = "run") -> list[str]:
    """The configs that come with the project for a command."""
    return sorted(CONFIGS) if script == "run" else [name for name, asks in _SCRIPTS.items() if asks == script]


def find(config: str, script: str = "run") -> tuple[str, Callable[..., Any]]:
    """The name and the `get_config` of a config.

    Args:
      config: "snapkv", "snapkv.py" or "configs/snapkv.py" for one of the project, or a path to a file of one's own.
      script: the command, as "run" and "learn budget".

    Raises:
      ValueError: no such config, naming those that exist; one for another script; a file that fails when it is loaded,
        naming the line; or one without `get_config`, or whose options have no types that can be read. The `get_config`
        of a file elsewhere raises it too, naming the line, whatever its code raises.
    """
    path = pathlib.Path(config)
    stem = path.stem if path.suffix == ".py" else path.name
    here = path.parent == pathlib.Path(".") or (path.parent == pathlib.Path("configs") and not path.is_file())
    if here and script == "run" and stem in CONFIGS:
        return stem, CONFIGS[stem]
    if here and stem in available(script):
        path = _HERE / f"{stem}.py"
    elif here and stem in _SCRIPTS:
        raise ValueError(f"{stem}.py is a config of kvjax {_SCRIPTS[stem]}, not of kvjax {script}")
    if path.suffix != ".py" or not path.is_file():
        raise unknown("config", config, available(script), "give a path to a .py file")
    get_config = getattr(_load(path), "get_config", None)
    if not callable(get_config):
        raise ValueError(f"{path} defines no get_config(budget=..., ...) -> Experiment")
    try:
        typing.get_type_hints(get_config)
    except Exception as e:
        raise ValueError(f"{path}: the types of get_config's options cannot be read: {type(e).__name__}: {e}") from e
    return path.stem, get_config if path.parent == _HERE else _signed(path, get_config)


def origin(path: str | pathlib.Path) -> str:
    """The name of a file and the SHA-256 of its bytes, shortened: what something that its code makes came from."""
    path = pathlib.Path(path)
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def _signed(path: pathlib.Path, get_config: Callable[..., Any]) -> Callable[..., Any]:
    """The `get_config` of a user's file; what it returns says so, and which options it was given (`origin`)."""
    file, signature = origin(path), inspect.signature(get_config)

    @functools.wraps(get_config)
    def signed(*args: Any, **given: Any) -> Any:
        with _at_home(path):
            found = get_config(*args, **given)
        if not hasattr(found, "origin"):
            return found
        options = signature.bind(*args, **given)
        options.apply_defaults()
        own = {name: x for name, x in options.arguments.items() if name not in ("budget", "setup", "prompts")}
        return dataclasses.replace(found, origin=f"{file} with {own}")

    return signed


def unknown(what: str, name: str, known: Iterable[str], otherwise: str) -> ValueError:
    """The error of a name that stands for nothing: which one may be meant, all that there are, what else to write."""
    known = [*known]
    near = difflib.get_close_matches(pathlib.PurePath(name).name.removesuffix(".py"), known, 1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return ValueError(f"no {what} {name!r}{meant}; there are {', '.join(known)}, or {otherwise}")


def function(reference: str) -> Callable[..., Any]:
    """A function of a Python file.

    Args:
      reference: "path.py:name".

    Returns:
      The function. Whatever its code raises is a ValueError that names the line.

    Raises:
      ValueError: no such file, a file that fails when it is loaded, naming the line, or one without such a function,
        naming those that it has.
    """
    file, _, name = reference.rpartition(":")
    if not file:
        raise ValueError(f"{reference!r} names no function; write path.py:name")
    path = pathlib.Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{reference!r}: there is no Python file {file!r}; write path.py:name")
    module = _load(path)
    found = getattr(module, name, None)
    if not callable(found):
        own = [n for n, x in vars(module).items() if callable(x) and getattr(x, "__module__", "") == module.__name__]
        raise ValueError(f"{path} defines no function {name!r}; it has {', '.join(own) or 'none'}")
    return _at_home(path)(found)


def _load(path: pathlib.Path) -> types.ModuleType:
    """The module that a Python file makes, errors of which name their line."""
    spec = importlib.util.spec_from_file_location(str(path.absolute()), path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look types up that are written as text
    with _at_home(path):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _beside(path: pathlib.Path) -> Iterator[None]:
    """Lets a file import those of its folder while its code runs, after what is installed."""
    folder = str(path.absolute().parent)
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


@contextlib.contextmanager
def _at_home(path: pathlib.Path) -> Iterator[None]:
    """Runs code of a file: errors name its line, and files beside it can be imported."""
    with _naming(path), _beside(path):
        yield


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Names the line of a config in errors that its code raises.

    Raises:
      ValueError: what was raised, as one line.
    """
    try:
        yield
    except SyntaxError as e:
        raise ValueError(f"{e.filename or path}, line {e.lineno}: {e.msg}") from e
    except (Exception, SystemExit) as e:
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path.absolute())]
        what = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
        raise ValueError(f"{path}, line {lines[-1] if lines else '?'}: {what}") from e
