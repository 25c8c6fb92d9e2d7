"""Functions as values: compared, hashed and printed by what they compute, not by where they lie in memory.

What a function computes is its bytecode and its constants, and all that it computes with: what it has closed over, its
defaults, and the globals that it reads, among them other functions and what it takes of modules. Numbers, text, arrays,
dataclasses and containers of these count by their contents. What has an equality of its own counts by that, and every
other object, such as an instance of a plain class or an array that is being traced, as itself alone. Code that is
installed, with kvjax, Python or a package, has no globals that change.

Drivers look again at what the functions of a policy compute when they plan with it, and refuse one that has changed
since the policy was made.
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

from kvjax.pallas_kernels.values import complete_repr

_INSTALLED = (pathlib.Path(__file__).parent, pathlib.Path(os.__file__).parent)
_JITTED = type(jax.jit(lambda: None))


@dataclasses.dataclass(frozen=True)
class Installed:
    """Installed code, by name and bytecode; it prints as its name."""

    name: str
    code: Hashable = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Itself:
    """An object that counts by its own equality, which for most is identity; it prints as it does without address."""

    value: Any

    @functools.cached_property
    def _by_value(self) -> bool:
        if type(self.value).__hash__ is object.__hash__ or isinstance(self.value, np.ndarray | jax.Array):
            return False
        try:
            hash(self.value)
        except TypeError:
            return False
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Itself) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or (self._by_value and bool(self.value == other.value))

    def __hash__(self) -> int:
        return hash(self.value) if self._by_value else id(self.value)

    def __repr__(self) -> str:
        return shown(self.value)


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A function that equals all that compute the same, so that a policy which holds it does too.

    What it computes is looked at once, when this is made, and compiled programs know it by that. After later changes of
    what it has closed over, or of globals that it reads, drivers refuse it (`check_unchanged`).

    Attributes:
      fn: the function, or another callable.
      meaning: what it computes.
    """

    fn: Callable[..., Any]
    meaning: Hashable = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "meaning", meaning(self.fn))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.fn(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and (self is other or self.meaning == other.meaning)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.meaning)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _digest(self) -> str:
        return digest(self.meaning)

    def __repr__(self) -> str:
        return f"{getattr(self.fn, '__name__', type(self.fn).__name__)}:{self._digest[:8]}"


def by_code(value: Any) -> Function:
    """The rule of fields that hold functions (`kvjax.pallas_kernels.values.settle`).

    Raises:
      ValueError: what cannot be called.
    """
    if not callable(value):
        raise ValueError("give a function")
    return value if isinstance(value, Function) else Function(value)


def check_unchanged(value: Any) -> None:
    """Raises ValueError where a function that a policy holds computes otherwise than when the policy was made.

    Programs that were compiled before would still compute what it was, and others what it is.

    Args:
      value: a policy, or anything that one is made of.
    """
    match value:
        case Function():
            now = meaning(value.fn)
            if now != value.meaning:
                names = " and ".join(f"`{n}`" for n in _changed(value.fn, value.meaning, now)) or "something"
                raise ValueError(
                    f"the function {value} reads {names}, which has changed since the policy was made; make the policy "
                    "anew, with a function of its own for other values"
                )
        case tuple():
            for part in value:
                check_unchanged(part)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                check_unchanged(getattr(value, field.name, None))


def _changed(function: Any, before: Any, now: Any) -> list[str]:
    """Names of what a function reads that differ in two of its meanings, as far as they are known."""
    if not isinstance(function, types.FunctionType) or not before[:1] == now[:1] == ("function",):
        return []
    names = [n for n, c in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True) if _filled(c)]
    (was, closed), (had, has) = ((found[3][0][1] for found in (before, now)), (dict(f[4][1]) for f in (before, now)))
    cells = zip(names, was, closed, strict=True) if len(was) == len(closed) else ()
    found = [name.strip("'") for _, name in sorted(had | has) if had.get(("str", name)) != has.get(("str", name))]
    return [n for n, one, other in cells if one != other] + found


def _filled(cell: types.CellType) -> bool:
    return cell != types.CellType()


def definition(value: Any) -> str:
    """The complete repr of a policy, or of anything that one is made of; behind it a digest of what that does not show.

    That is what functions and classes that are not installed compute, and the contents of arrays. Addresses, which
    differ from process to process, are left out.
    """
    found = meaning(value)
    return f"{shown(value)} of code {digest(found)}" if any(_unseen(found)) else shown(value)


def shown(value: Any) -> str:
    """The complete repr of a value without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", complete_repr(value))


def digest(found: Hashable) -> str:
    """The same in every process for what is made of the same code, but not for other versions of Python."""
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def meaning(value: Any) -> Hashable:
    """What a value is to a computation that holds it: equal for what computes the same, as the module says."""
    return _meaning(value, {})


def _meaning(value: Any, seen: dict[int, Any]) -> Hashable:
    """See `meaning`; `seen` has the functions and classes found so far, and the values that this one is inside of."""
    again = functools.partial(_meaning, seen=seen)
    if id(value) in seen:
        return "again", [*seen].index(id(value))
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() if type(value).__module__ == "builtins":
            return type(value).__name__, repr(value)  # 0.0 and -0.0, or 1 and True, are equal and not the same
        case Function():
            return value.meaning
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
            return kind, tuple(sorted(map(meaning, value), key=repr))
        case dict():
            return kind, tuple((again(k), again(v)) for k, v in value.items())
    if isinstance(value, _JITTED):
        jitted: Any = value
        return kind, again(jitted.__wrapped__)
    if dataclasses.is_dataclass(value):
        fields = ((f.name, again(getattr(value, f.name, None))) for f in dataclasses.fields(value))
        return "dataclass", again(type(value)), tuple(fields)
    if _is_installed(type(value)):
        return Itself(value)
    kept = lambda name: isinstance(inspect.getattr_static(type(value), name, None), functools.cached_property)
    held = {n: x for n, x in getattr(value, "__dict__", {}).items() if not kept(n)}
    return "object", Itself(value), again(type(value)), again(held)


def _of_function(function: types.FunctionType, seen: dict[int, Any]) -> Hashable:
    code, name = _of_code(function.__code__), f"{function.__module__}.{function.__qualname__}"
    if _is_installed(function) and "<locals>" not in name:
        return Installed(name, code)
    cells = [c.cell_contents for c in function.__closure__ or () if _filled(c)]
    held = cells, function.__defaults__, function.__kwdefaults__, function.__dict__
    inside = tuple(_meaning(x, seen) for x in held)
    if _is_installed(function):
        return "installed", Installed(name, code), inside
    return "function", function.__name__, code, inside, _meaning(_globals(function), seen)


def _of_code(code: types.CodeType) -> Hashable:
    """What a function does with what it is given; the lines it stands in, and names of its variables, do not matter."""
    count = code.co_argcount + code.co_kwonlyargcount
    kind = code.co_varnames[:count], code.co_argcount, code.co_posonlyargcount, code.co_flags & ~inspect.CO_NESTED
    inside = (_of_code(c) if isinstance(c, types.CodeType) else meaning(c) for c in code.co_consts)
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
        return Installed(f"{definer.__module__}.{definer.__qualname__}", Itself(definer))
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
        return Itself(array)
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
