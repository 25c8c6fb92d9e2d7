"""What values compute, as text: two policies of equal text give equal results, also in another process.

What a function computes is its bytecode and its constants, and all that it computes with: what it has closed over, its
defaults, and the globals that it reads, among them other functions and what it takes of modules. Numbers, text, arrays,
dataclasses and containers of these count by their contents, and every other object by its class and what it holds. Code
that is installed, with kvjax, Python or a package, has no globals that change.
"""

import dataclasses
import dis
import functools
import hashlib
import inspect
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

_INSTALLED = (pathlib.Path(kvjax.__file__).parent, pathlib.Path(os.__file__).parent)
_JITTED = type(jax.jit(lambda: None))


def definition(value: Any) -> str:
    """The repr of a policy, or of anything that one is made of; behind it a digest of what that does not show.

    That is what functions and classes that are not installed compute, and the contents of arrays. Addresses, which
    differ from process to process, are left out.
    """
    found, shown = _meaning(value, {}), _shown(value)
    if not any(_unseen(found)):
        return shown
    return f"{shown} of code {hashlib.sha256(repr(found).encode()).hexdigest()[:16]}"


def _shown(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _meaning(value: Any, seen: dict[int, Any]) -> Hashable:
    """What a value is to a computation that holds it: equal for what computes the same.

    `seen` has the functions and classes found so far, and the values that this one is inside of.
    """
    again = functools.partial(_meaning, seen=seen)
    if id(value) in seen:
        return "again", [*seen].index(id(value))
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() if type(value).__module__ == "builtins":
            return type(value).__name__, repr(value)  # 0.0 and -0.0, or 1 and True, are equal and not the same
        case types.ModuleType():
            return "module", value.__name__
        case np.ndarray() | np.generic() | jax.Array():
            return _of_array(value)
        case types.FunctionType() | type():
            seen[id(value)] = value
            return _of_class(value, seen) if isinstance(value, type) else _of_function(value, seen)
    seen[id(value)] = value
    found = _of_parts(value, again)
    del seen[id(value)]
    return found


def _of_parts(value: Any, again: Callable[[Any], Hashable]) -> Hashable:
    """The meaning of what is made of others."""
    kind = type(value).__name__
    match value:
        case functools.partial():
            return kind, again(value.func), again(value.args), again(value.keywords)
        case types.MethodType():
            return kind, again(value.__func__), again(value.__self__)
        case tuple() | list():
            return kind, tuple(map(again, value))
        case set() | frozenset():
            return kind, tuple(sorted((_meaning(x, {}) for x in value), key=repr))
        case dict():
            return kind, tuple((again(k), again(v)) for k, v in value.items())
    if isinstance(value, _JITTED):
        jitted: Any = value
        return kind, again(jitted.__wrapped__)
    if dataclasses.is_dataclass(value):
        fields = ((f.name, again(getattr(value, f.name, None))) for f in dataclasses.fields(value))
        return "dataclass", again(type(value)), tuple(fields)
    if _is_installed(type(value)):
        return _shown(value)
    kept = lambda name: isinstance(inspect.getattr_static(type(value), name, None), functools.cached_property)
    held = {n: x for n, x in getattr(value, "__dict__", {}).items() if not kept(n)}
    return "object", again(type(value)), again(held)


def _of_function(function: types.FunctionType, seen: dict[int, Any]) -> Hashable:
    code, name = _of_code(function.__code__), f"{function.__module__}.{function.__qualname__}"
    if _is_installed(function) and "<locals>" not in name:
        return name
    cells = [c.cell_contents for c in function.__closure__ or () if c != types.CellType()]
    held = cells, function.__defaults__, function.__kwdefaults__, function.__dict__
    inside = tuple(_meaning(x, seen) for x in held)
    if _is_installed(function):
        return "installed", name, inside
    return "function", function.__name__, code, inside, _meaning(_globals(function), seen)


def _of_code(code: types.CodeType) -> Hashable:
    """What a function does with what it is given; the lines it stands in, and names of its variables, do not matter."""
    count = code.co_argcount + code.co_kwonlyargcount
    kind = code.co_varnames[:count], code.co_argcount, code.co_posonlyargcount, code.co_flags & ~inspect.CO_NESTED
    inside = (_of_code(c) if isinstance(c, types.CodeType) else _meaning(c, {}) for c in code.co_consts)
    return code.co_code, code.co_exceptiontable, code.co_names, kind, tuple(inside)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside."""
    yield code
    for inside in code.co_consts:
        if isinstance(inside, types.CodeType):
            yield from _codes(inside)


def _globals(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function reads, and what it may take of modules that are not installed."""
    codes = [*_codes(function.__code__)]
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    read = {i.argval for code in codes for i in dis.get_instructions(code) if i.opname in loads}
    names = sorted({n for code in codes for n in code.co_names})
    found = {n: function.__globals__[n] for n in sorted(read) if n in function.__globals__}
    spaces = [*found.values()]
    for space in spaces:  # grows by the modules in modules
        if isinstance(space, types.ModuleType) and not _is_installed(space):
            taken = {f"{space.__name__}.{n}": vars(space)[n] for n in names if n in vars(space)}
            spaces += [x for x in taken.values() if all(x is not other for other in spaces)]
            found |= taken
    return found


def _of_class(definer: type, seen: dict[int, Any]) -> Hashable:
    if _is_installed(definer):
        return f"{definer.__module__}.{definer.__qualname__}"
    functions = types.FunctionType, staticmethod, classmethod, property
    plain = lambda x: getattr(x, "__func__", getattr(x, "fget", x)) if isinstance(x, functions) else x
    written = lambda n, x: not n.startswith("_") or (isinstance(x, functions) and not _is_generated(x))
    members = {n: plain(x) for n, x in sorted(vars(definer).items()) if written(n, x)}
    return "class", definer.__qualname__, tuple(_meaning(b, seen) for b in definer.__bases__), _meaning(members, seen)


def _is_generated(member: Any) -> bool:
    """Whether a method is made from a class's fields, as dataclasses do."""
    return isinstance(member, types.FunctionType) and member.__code__.co_filename == "<string>"


def _of_array(array: Any) -> Hashable:
    """Dtype, shape and contents, where they are known, and no objects."""
    known = not isinstance(array, jax.core.Tracer) and not getattr(array, "is_deleted", lambda: False)()
    if not known or not getattr(array, "is_fully_addressable", True) or getattr(array.dtype, "hasobject", False):
        return _shown(array)
    with jax.ensure_compile_time_eval():  # a key that is known, also where others are traced
        data = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    contents = hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()[:32]
    return "array", type(array).__name__, str(array.dtype), array.shape, getattr(array, "weak_type", False), contents


def _unseen(found: Hashable) -> Iterator[bool]:
    """For every part of a meaning, whether a repr does not show it."""
    if isinstance(found, tuple):
        yield found[:1] in (("function",), ("class",), ("array",))
        for part in found:
            yield from _unseen(part)


def _is_installed(definer: Any) -> bool:
    """Whether a function, class or module comes with the project, Python or an installed package."""
    if isinstance(definer, types.FunctionType):
        file = pathlib.Path(definer.__code__.co_filename)
        return str(file).startswith("<frozen") or _is_known(file)
    module = definer if isinstance(definer, types.ModuleType) else sys.modules.get(definer.__module__ or "")
    file = getattr(module, "__file__", None)
    return module is not None and module.__name__ != "__main__" and (file is None or _is_known(pathlib.Path(file)))


def _is_known(file: pathlib.Path) -> bool:
    return "site-packages" in file.parts or any(file.is_relative_to(k) for k in _INSTALLED)
