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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.contract import FrozenArrays
from kvjax.experiments.core.command import write_json

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax", "orbax-checkpoint", "transformers", "kvjax")
_SOURCES = pathlib.Path(kvjax.__file__).parent
_SWITCHES = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")


def definition(value: Any, origin: str = "") -> str:
    """What a policy is, or anything that one is made of, as text; equal texts give equal results.

    That is its repr without addresses, which differ from process to process; a digest of the arrays inside, of which a
    repr shows a part; and where it came from, if that is a file of a user: functions show no more than their names. Not
    seen are modules that such a file imports, and files that it reads: after a change to these, begin anew.

    Args:
      value: a policy, its learned parameters, a task's builder.
      origin: the user's file (`configs.loading.origin`) and what its code was given; empty for what is the project's.
    """
    shown, digest = repr(value), hashlib.sha256()
    for array in (arrays := [*_arrays(value, set())]):
        digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    shown += f" of arrays {digest.hexdigest()[:16]}" if arrays else ""
    shown += f" of {origin}" if origin else ""
    return re.sub(r" at 0x[0-9a-f]+", "", shown)


def _arrays(value: Any, seen: set[int]) -> Iterator[np.ndarray]:
    """The arrays inside, but for those whose repr is a digest."""
    if id(value) in seen or isinstance(value, FrozenArrays | type | types.ModuleType):
        return
    seen.add(id(value))
    parts: Iterable[Any]
    match value:
        case np.ndarray() | jax.Array():
            is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
            yield np.asarray(jax.random.key_data(value) if is_key else value)
            return
        case tuple() | list():
            parts = value
        case Mapping():
            parts = value.values()
        case functools.partial():
            parts = value.func, value.args, value.keywords
        case _ if dataclasses.is_dataclass(value):
            parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        case _:
            parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from _arrays(part, seen)


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


def write_found(path: pathlib.Path | None, **found: Any) -> None:
    """Writes what a script found as JSON, beside how to make it again (`environment`); without a path, nothing."""
    if path is not None:
        module = getattr(sys.modules["__main__"], "__spec__", None)  # of `python -m`, whose first argument is a path
        script = sys.argv[:1] if module is None else ["-m", module.name.removesuffix(".__main__")]
        write_json(path, environment(["python", *script, *sys.argv[1:]]) | found)


def _code() -> str:
    """A digest of the project's own sources."""
    folders = os.walk(_SOURCES, followlinks=True)  # in a checkout some of them lie beside the package
    files = sorted(pathlib.Path(folder, f) for folder, _, found in folders for f in found if f.endswith(".py"))
    return _digest(*(x for f in files for x in (str(f.relative_to(_SOURCES)).encode(), f.read_bytes())))


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
    if not (_SOURCES.parent / "pyproject.toml").is_file():
        return None  # installed: a repository around it would be another one
    try:
        done = subprocess.run(["git", *args], cwd=_SOURCES, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # not a checkout, or no git: the manifest says null
    return done.stdout.strip()
