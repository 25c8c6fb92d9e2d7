"""Where results come from: the command, the code, the machine; and what says whether two policies are the same."""

import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from pallas_kernels.values import complete_repr

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax", "orbax-checkpoint", "transformers", "kvjax")
_OURS = ("kvjax", "pallas_kernels", "models", "configs", "experiments")
_ROOT = pathlib.Path(__file__).parents[2]
_SWITCHES = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")


def device_info() -> dict[str, Any]:
    """What this runs on, and with which versions."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "count": jax.device_count(),
        "cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
    }


def environment(command: list[str]) -> dict[str, Any]:
    """How to make the same results again: the command, the code, versions, jax's switches and the device."""
    device = device_info()
    return {
        "command": command,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "code": _code(),
        "versions": device.pop("versions"),
        "switches": {s: getattr(jax.config, s) for s in _SWITCHES} | {"XLA_FLAGS": os.environ.get("XLA_FLAGS")},
        "device": device,
    }


def definition(value: Any) -> str:
    """The complete repr of a policy, or of anything that one is made of; behind it a digest of what that does not show.

    That is the code of functions and classes that are not the project's, what functions have closed over, and the
    globals that these read. Addresses, which differ from process to process, are left out.
    """
    unseen = [*_unseen(value, {})]
    return f"{_shown(value)} of code {_digest(*unseen)}" if unseen else _shown(value)


def _shown(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", complete_repr(value))


def _unseen(value: Any, seen: dict[int, Any], *, shown: bool = True) -> Iterator[bytes]:
    """What the repr of a value does not show; all of it where the value itself is not shown."""
    if id(value) in seen or isinstance(value, types.ModuleType):
        return
    seen[id(value)] = value  # kept, so that no other value gets its id
    inside, hidden = [], []
    if isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.items()]
    elif isinstance(value, types.MethodType):
        inside, hidden = [value.__self__], [value.__func__]
    elif isinstance(value, types.FunctionType):
        yield from _foreign(value)
        cells = [c.cell_contents for c in value.__closure__ or () if c != types.CellType()]
        hidden = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items(), *_read(value)]
    elif isinstance(value, type):
        yield from _foreign(value)
        if _file(value) is not None:
            shown, hidden = True, _members(value)  # its repr names the file's place
    elif isinstance(value, tuple | list | dict):
        inside = [*value.items()] if isinstance(value, dict) else [*value]
    elif isinstance(value, set | frozenset):
        inside = sorted(value, key=_shown)
    elif isinstance(value, np.ndarray | jax.Array):
        yield f"{value.dtype} {value.shape}".encode() + np.asarray(value).tobytes()
    else:
        yield from _unseen(type(value), seen)
        if dataclasses.is_dataclass(value):
            inside = [getattr(value, f.name) for f in dataclasses.fields(value)]
        elif _file(type(value)) is not None:
            hidden = [*getattr(value, "__dict__", {}).items()]
    if not shown:  # sets, which what is inside may be, have no order
        several = isinstance(value, set | frozenset | tuple | list | dict)
        yield (f"{type(value).__name__} of {len(value)}" if several else _shown(value)).encode()
    for each in inside:
        yield from _unseen(each, seen, shown=shown)
    for each in hidden:
        yield from _unseen(each, seen, shown=False)


def _read(function: types.FunctionType) -> list[Any]:
    """The globals that a function with a `_file` reads, and what it takes of modules that have one."""
    if _file(function) is None:
        return []
    codes, names = [function.__code__], set()
    for code in codes:  # grows by the functions inside
        names |= {*code.co_names}
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    pick = lambda space: [space[n] for n in sorted(names) if n in space]
    found = pick(function.__globals__)
    for each in found:  # grows by what is in modules
        if isinstance(each, types.ModuleType) and _file(each) is not None:
            found += [x for x in pick(vars(each)) if not any(x is other for other in found)]
    return found


def _members(definer: type) -> list[Any]:
    """Bases, methods and attributes of a class, without what Python adds."""
    functions = types.FunctionType, staticmethod, classmethod, property
    members = [x for n, x in sorted(vars(definer).items()) if isinstance(x, functions) or not n.startswith("_")]
    plain = lambda x: getattr(x, "__func__", getattr(x, "fget", x)) if isinstance(x, functions) else x
    return [*definer.__bases__, *map(plain, members)]


def _file(definer: Any) -> pathlib.Path | None:
    """Where a function, class or module is defined, unless with the project, Python or an installed package."""
    module = definer if isinstance(definer, types.ModuleType) else sys.modules.get(definer.__module__ or "")
    file = pathlib.Path(getattr(module, "__file__", None) or "")
    if isinstance(definer, types.FunctionType):
        file = pathlib.Path(definer.__code__.co_filename)
    elif not file.is_file():
        return None  # built in
    known = [*(_ROOT / p for p in _OURS), pathlib.Path(os.__file__).parent]
    return None if "site-packages" in file.parts or any(file.is_relative_to(k) for k in known) else file


def _foreign(definer: Any) -> Iterator[bytes]:
    """The code of a function or class that has a `_file`, and all else that stands there."""
    file = _file(definer)
    if file is None:
        return
    if isinstance(definer, types.FunctionType):  # there may be several in a line
        code = definer.__code__
        yield code.co_code + str([*code.co_positions()]).encode()
        yield file.read_bytes() if file.is_file() else _shown(code.co_consts).encode()
    else:
        yield file.read_bytes()


def _code() -> str:
    """A digest of the project's own sources."""
    files = sorted(f for p in _OURS for f in (_ROOT / p).rglob("*.py"))
    return _digest(*(x for f in files for x in (str(f.relative_to(_ROOT)).encode(), f.read_bytes())))


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=_ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # not a checkout, or no git: the manifest says null
    return done.stdout.strip()
