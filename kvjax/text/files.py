"""Saves compressed prompts, a file each, and loads them bit for bit.

A file holds arrays and words about them (safetensors), and no code: a policy is given again when it is loaded.
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from kvjax.contract import MOST, Model, Policy, Size, kv_layers, place
from kvjax.pallas_kernels.kinds import Amount, check_fields
from kvjax.run.checks import check_model
from kvjax.run.memory import read_shapes
from kvjax.run.plan import infos_of, planned
from kvjax.run.state import State

_Path = str | os.PathLike[str]
_FAULT = ".fault"  # how the paths of `Storage.fault` end


@dataclasses.dataclass(frozen=True)
class _Words:
    """What a file says of a state."""

    policy: str
    model: str
    lengths: tuple[Size, ...]
    sizes: tuple[Size, Amount]
    capacities: tuple[Amount, ...]
    notes: Mapping[str, Any] | None
    steady: bool = True
    fitted: bool = False

    def __post_init__(self):
        check_fields(self)
        if not 0 < max(self.lengths, default=0) <= self.sizes[0]:
            raise ValueError(f"lengths={self.lengths}, but sizes={self.sizes}")


def save_state(path: _Path, model: Model, params: PyTree, state: State, *, policy: Policy) -> None:
    """Writes a state, such as a compressed prompt, to a file, which replaces an earlier one.

    Args:
      path: the file.
      model, params: the model that read the prompt. They are not in the file, but what tells them from others.
      state: what `prefill` or a later call returned.
      policy: the policy that it was read under.

    Raises:
      ValueError: what is no state, or holds no prompt; a policy that it was not read under, or that holds something
        which nothing tells from others in another process, such as a lambda; a path at which there is something else.
      OSError: the file could not be written.
    """
    write_state(path, model, params, state, policy, None)


def write_state(path: _Path, model: Model, params: PyTree, state: State, policy: Policy, notes: object) -> None:
    """Writes a state and notes, any JSON, to a file (`save_state`)."""
    check_model(model, params)
    words: dict[str, Any] = {"policy": described(policy)}
    if not state.ready:
        raise ValueError("the state holds no prompt that was read to its end; save what kvjax.prefill returns")
    infos, lengths = state.plan.infos, np.asarray(state.prompt_length)
    if planned(policy, infos, lengths)[0].layers != state.plan.layers:
        raise ValueError(f"the state was read under another policy than this {type(policy).__name__}; give that")
    words |= {
        "model": _fingerprint(model, params),
        "lengths": lengths.tolist(),
        "sizes": [infos[0].prompt_len, infos[0].max_new_tokens],
        "capacities": state.plan.capacities,
        "fitted": state.plan.fitted,
        "steady": state.steady,
        "notes": notes,
    }
    _write(path, dict(zip(_names(state), map(_plain, jax.tree.leaves(state)), strict=True)), words)


def _names(state: State) -> list[str]:
    """A name for each array: its number among all but faults, which earlier files lack."""
    number = itertools.count()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return [path if path.endswith(_FAULT) else f"{next(number):05}" for path in paths]


def load_state(path: _Path, model: Model, params: PyTree, *, policy: Policy) -> State:
    """Loads a saved state.

    Args:
      path: the file.
      model, params: the model that read the prompt.
      policy: the policy that it was read under; an equal one, rebuilt, will do.

    Raises:
      ValueError: no such file, a damaged one, or a state of another policy or model.
    """
    return read_state(path, model, params, policy)[0]


def read_state(path: _Path, model: Model, params: PyTree, policy: Policy) -> tuple[State, Any]:
    """Reads the state and the notes that `write_state` wrote."""
    check_model(model, params)
    found, arrays = _read(path)
    with words_of(path):
        words = _Words(**found)
    if not same(words.policy, here := described(policy)):
        raise ValueError(
            f"{path} was made under another policy, {_differing(words.policy, here)}; give the same policy"
        )
    if (there := len(words.capacities)) != (here := len(kv_layers(model.config))):
        raise ValueError(
            f"{path} holds a state of {there} layers, but the model has {here}; give the model that read the prompt"
        )
    lengths, config = np.asarray(words.lengths, np.int32), model.config
    plan, hparams = planned(policy, infos_of(config, policy, *words.sizes), lengths)
    plan = dataclasses.replace(plan, capacities=words.capacities, fitted=words.fitted)
    shapes = read_shapes(config, policy, plan, hparams, lengths)[0]
    leaves, tree = jax.tree.flatten(shapes)
    wanted = {name: jax.eval_shape(_plain, x) for name, x in zip(_names(shapes), leaves, strict=True)}
    arrays = {name: jnp.zeros(x.shape, bool) for name, x in wanted.items() if name.endswith(_FAULT)} | arrays
    here, there = ({(name, x.shape, x.dtype) for name, x in each.items()} for each in (wanted, arrays))
    if here != there:
        raise ValueError(
            f"{path} holds the state of another model or version: of its {len(there)} arrays, {len(there - here)} do "
            f"not fit the {len(here)} of this model; give the model that read the prompt"
        )
    if words.model != _fingerprint(model, params):
        raise ValueError(f"{path} holds the state of another model; give the model and parameters that read the prompt")
    wrap = lambda name, like: jax.random.wrap_key_data(arrays[name]) if _is_key(like) else arrays[name]
    state = tree.unflatten(map(wrap, wanted, leaves))
    if (read := tuple(state.prompt_length.tolist())) != words.lengths:
        raise ValueError(f"{path} says lengths={words.lengths}, but its prompts have {read} tokens; save it anew")
    marked = lambda kv: kv.fault | (kv.head_pos >= MOST).any(-1)  # earlier files have a position that no token has
    layers = tuple(kv.replace(fault=marked(kv)) for kv in state.layers)
    return dataclasses.replace(state, layers=layers, steady=words.steady), words.notes


@contextlib.contextmanager
def words_of(path: _Path) -> Iterator[None]:
    """Names the file in what its words raise."""
    try:
        yield
    except (TypeError, ValueError) as e:
        raise ValueError(f"{path} holds words that no file of kvjax has ({e}); save it anew") from e


def _differing(there: str, here: str) -> str:
    """Where two policies differ, as `described` has them."""
    a, b = (re.split(r"(?<=, )|(?<=\()", x) for x in (there, here))
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    each = [(a[i:j], b[k:n]) for op, i, j, k, n in blocks if op != "equal"]
    shown = lambda x: "".join(x).rstrip(", ") or "nothing"
    return ", ".join(f"with {shown(x)} and not {shown(y)}" for x, y in each)


def described(x: Any) -> str:
    """A string for a policy, or any part of one, that is the same in every process.

    Functions are told apart by their modules and names, classes by their names.

    Raises:
      ValueError: a lambda or a function made by another; an object that nothing tells from others of its class.
    """
    several = lambda open, each, close: f"{open}{', '.join(each)}{close}"
    if isinstance(x, jax.Array | np.ndarray):
        return f"{x.dtype}{list(x.shape)} of digest {_digest(x)}"
    if isinstance(x, tuple | list):
        return several("(", map(described, x), ")")
    if isinstance(x, set | frozenset):
        return several("{", sorted(map(described, x)), "}")
    if isinstance(x, dict):
        return several("{", (f"{described(k)}: {described(v)}" for k, v in x.items()), "}")
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        each = (f"{f.name}={described(getattr(x, f.name))}" for f in dataclasses.fields(x))
        return several(f"{type(x).__qualname__}(", each, ")")
    if isinstance(x, functools.partial):
        return f"partial{described((x.func, x.args, x.keywords))}"
    if isinstance(x, types.MethodType):
        return f"method{described((x.__func__, x.__self__))}"
    if isinstance(x, types.FunctionType):
        found: Any = sys.modules.get(x.__module__)
        for name in x.__qualname__.split("."):
            found = getattr(found, name, None)
        while found is not None and found is not x:
            found = getattr(found, "__wrapped__", None)
        if found is None:
            raise ValueError(
                f"{place(x)} has no name by which another process finds it; give a function that a module has under "
                "its name, functools.partial of one, or a frozen dataclass with __call__"
            )
        return f"{x.__qualname__} of module {x.__module__}"
    if isinstance(x, type | types.ModuleType | types.BuiltinFunctionType):
        return x.__name__
    if hasattr(x, "__wrapped__"):
        return described(x.__wrapped__)
    if re.search(" at 0x[0-9a-f]+", found := repr(x)):
        raise ValueError(f"{found} is like any other {type(x).__name__} in another process; make it a frozen dataclass")
    return found


def same(there: str, here: str) -> bool:
    """Whether what a file says of a policy is `described` here; earlier files have the code of functions."""
    names = map(re.escape, re.split(r" of module [^,(){}]+", here))
    return there == here or re.fullmatch(r" of code \w{16}\(.*\)".join(names), there) is not None


def _read(path: _Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """The metadata and the arrays of a file."""
    damaged = "is damaged, or no file of kvjax ({}); copy it again, or save it anew"
    if not _as_path(path).is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with safe_open(os.fspath(path), framework="flax") as file:
            words = json.loads((file.metadata() or {})["kvjax"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"{path} {damaged.format(e)}") from e
    if not isinstance(words, dict) or words.pop("digest", None) != _digest(
        json.dumps(words), *(arrays[n] for n in sorted(arrays))
    ):
        raise ValueError(f"{path} {damaged.format('it is not what was written')}")
    return {name: _fixed(x) for name, x in words.items()}, arrays


def _fixed(x: Any) -> Any:
    """JSON with tuples in place of lists."""
    if isinstance(x, dict):
        return {name: _fixed(each) for name, each in x.items()}
    return tuple(map(_fixed, x)) if isinstance(x, list) else x


def _write(path: _Path, arrays: dict[str, Array], words: dict[str, Any]) -> None:
    """Replaces a file atomically: there is always the old one or the new one."""
    file = _as_path(path)
    if file.exists():
        try:
            _read(file)
        except ValueError as e:
            raise ValueError(f"{path} exists, and is no file that kvjax wrote; choose another path") from e
    words = {**words, "digest": _digest(json.dumps(words), *(arrays[n] for n in sorted(arrays)))}
    try:
        with tempfile.TemporaryDirectory(dir=file.parent) as beside:
            new = pathlib.Path(beside, "new")
            save_file(arrays, os.fspath(new), metadata={"kvjax": json.dumps(words)})
            with new.open("rb") as written:
                os.fsync(written.fileno())
            new.replace(file)
    except (OSError, SafetensorError) as e:
        raise OSError(f"{path} could not be written: {e}") from e


def _as_path(path: object) -> pathlib.Path:
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ValueError(f"{path!r} is not the path of a file")
    return pathlib.Path(path)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain(x: Array) -> Array:
    return jax.random.key_data(x) if _is_key(x) else jnp.asarray(x)


def _fingerprint(model: Model, params: PyTree) -> str:
    """A digest of a model: of its configuration, and of the bits of each parameter."""
    each = jax.tree_util.tree_leaves_with_path(_mixed(params))
    return _digest(repr(model.config), *(f"{jax.tree_util.keystr(name)} {int(x)}" for name, x in each))


@jax.jit
def _mixed(params: PyTree) -> PyTree:
    """A sum over each array of its bits, mixed with their places so that no bit is lost in it."""

    def mixed(x: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(x, f"uint{min(8 * x.dtype.itemsize, 32)}").reshape(-1).astype(jnp.uint32)
        bits = bits * jnp.uint32(0x9E3779B1) + jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(0x85EBCA77)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(0xC2B2AE3D)
        return (bits ^ (bits >> 13)).sum()

    return jax.tree.map(mixed, params)


def _digest(*parts: str | Array | np.ndarray) -> str:
    found = hashlib.sha256()
    for x in parts:
        found.update(x.encode() if isinstance(x, str) else np.ascontiguousarray(x).tobytes())
    return found.hexdigest()[:16]
