"""Counts of tokens, and values: frozen dataclasses, by which compiled programs are shared."""

import dataclasses
import functools
import hashlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar, dataclass_transform

import jax
import numpy as np
from jaxtyping import Int

from kvjax.pallas_kernels import kinds
from kvjax.pallas_kernels.kinds import MOST, Kind, check_fields
from kvjax.pallas_kernels.pytree import described

Prompts = Int[np.ndarray, "M"]  # a number for every prompt: its length, or a count of tokens
T = TypeVar("T")


A_COUNT = Kind(
    "a number of tokens (int), a share of the prompt (float from 0 to 1), or a function of both",
    lambda n: callable(n) or (kinds.whole(n) and n >= 0) or (kinds.real(n) and 0 <= n <= 1),
)
# An int is a number of tokens, a float a share of the prompt, a function gets (prompts "M", budgets "M") on the host.
Count = Annotated[int | float | Callable[[Any, Any], Any], A_COUNT]


def count(*, default: Any = dataclasses.MISSING) -> Any:
    """A field that holds a `Count`. It is data: policies that differ in it share programs.

    Traced code reads it resolved to tokens, "B", as `hparams.<field>`; there the field itself is None.
    """
    return dataclasses.field(default=default, metadata={"blank": True, "count": True})


def data(*, default: Any = dataclasses.MISSING) -> Any:
    """A field that is data but no `Count`. `sizes` or `hparams` turn it into arrays; traced code finds None in it."""
    return dataclasses.field(default=default, metadata={"blank": True})


def resolve(n: Count, prompt: Prompts, budget: Prompts | None = None) -> Prompts:
    """A count in tokens for every prompt.

    Args:
      n: the count.
      prompt: lengths of the prompts.
      budget: what the layer's budget is for each, in tokens; None where the count is that budget.

    Raises:
      ValueError: `n` is none of the three kinds of count, a negative number or a share outside [0, 1], or a function
        whose answer has another shape.
    """
    if not A_COUNT.holds(n):
        raise kinds.refused("count", n, A_COUNT.words)
    if isinstance(n, int | np.integer):
        return np.full_like(prompt, min(int(n), MOST), dtype=np.int64)
    if isinstance(n, float | np.floating):
        return np.floor(float(n) * prompt + 1e-9).astype(np.int64)
    found = np.asarray(n(prompt, budget))
    if found.shape != np.shape(prompt):
        raise ValueError(f"{place(n)} gave counts of shape {found.shape} for {np.shape(prompt)} prompts; give one each")
    return found


def place(fn: Any) -> str:
    """A function by its name, file and line, for errors; others as repr."""
    code = getattr(fn, "__code__", None)
    return repr(fn) if code is None else f"{fn.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def _compared(x: Any) -> tuple[tuple[Any, ...], list[type]]:
    """The fields of a value, and the types of what they hold: 1 token and the share 1.0 are two values."""
    fields = tuple(getattr(x, f.name) for f in dataclasses.fields(x) if f.compare)
    return fields, [*map(type, jax.tree.leaves(fields))]


def _equal(x: Any, y: Any) -> bool:
    return x is y or (type(x) is type(y) and _compared(x) == _compared(y))


@dataclass_transform(frozen_default=True, field_specifiers=(count, data, dataclasses.field))
def value(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass that checks its fields. Programs are shared by equal values.

    Equal ones have numbers of the same kinds: an int is a number of tokens, a float a share.

    Raises:
      ValueError: a field that is not what its annotation says.
    """
    made: Any = cls
    after: Any = vars(cls).get("__post_init__")

    def __post_init__(self: Any) -> None:
        if type(self).__post_init__ is __post_init__:  # once, not for each class that it is built on
            check_fields(self)
        after(self)

    if after is not None or not hasattr(cls, "__post_init__"):
        made.__post_init__ = check_fields if after is None else __post_init__
    if not {"__eq__", "__hash__"} & {*vars(cls)}:
        made.__eq__ = _equal
    return dataclasses.dataclass(frozen=True)(made)


@dataclass_transform(frozen_default=True, field_specifiers=(count, data, dataclasses.field))
class Value:
    """A frozen dataclass, and so is every subclass, without a decorator. Programs are shared by equal values.

    Raises:
      TypeError: a subclass has its own `__init__`, or assigns to a field without annotating it. Two values that differ
        in what is not a field would compare equal, and one would run the other's program.
      ValueError: a field holds what has no hash, such as a list or an array.
    """

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
        own, fields = vars(cls), {f.name for base in bases for f in dataclasses.fields(base)}
        if "__init__" in own:
            raise TypeError(
                f"{cls.__name__}: declare fields instead of __init__; values with hidden attributes would compare equal"
            )
        if bare := sorted(n for n in own if n in fields and n not in own.get("__annotations__", {})):
            raise TypeError(f"{cls.__name__}.{bare[0]} hides a field of that name: annotate it")
        made: Any = value(cls)
        fill = made.__init__

        @functools.wraps(fill)
        def filled(self: Any, *args: Any, **given: Any) -> None:
            fill(self, *args, **given)
            for f in dataclasses.fields(self):
                try:
                    hash(getattr(self, f.name))
                except TypeError as e:
                    raise ValueError(
                        f"field {f.name} of {type(self).__name__} is a {type(getattr(self, f.name)).__name__} ({e}); "
                        "give a tuple, FrozenArrays, or a parameter by `init_params`"
                    ) from None

        if dataclasses.fields(made):
            made.__init__ = filled


def compiled(x: Any, **fields: Any) -> Any:
    """A value with None in the fields that are data. Programs are compiled for it, and shared by it.

    Args:
      x: the value.
      fields: of it, others than its own.
    """
    if isinstance(x, tuple):
        return tuple(map(compiled, x))
    if not dataclasses.is_dataclass(x) or isinstance(x, type):
        return x
    y = object.__new__(type(x))
    for f in dataclasses.fields(x):
        own = None if f.metadata.get("blank") else compiled(getattr(x, f.name))
        object.__setattr__(y, f.name, fields.get(f.name, own))
    return y


class Tree(types.SimpleNamespace):
    """A pytree whose children have names: `tree.score`. It prints arrays as their types and shapes."""

    def __repr__(self) -> str:
        return f"Tree({', '.join(f'{name}={described(x)}' for name, x in vars(self).items())})"


def _flatten(x: Tree) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    names = tuple(sorted(vars(x)))
    return tuple(map(vars(x).__getitem__, names)), names


jax.tree_util.register_pytree_with_keys(
    Tree,
    lambda x: (tuple((jax.tree_util.DictKey(n), vars(x)[n]) for n in sorted(vars(x))), tuple(sorted(vars(x)))),
    lambda names, each: Tree(**dict(zip(names, each, strict=True))),
    _flatten,
)


class FrozenArrays(Mapping[str, np.ndarray]):
    """Named arrays that compare by content and hash, so that a policy can hold them. They cannot be written to."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        digest = hashlib.sha256()
        self._arrays = {}
        for name in sorted(arrays):
            x = np.array(arrays[name])
            x.setflags(write=False)
            self._arrays[name] = x
            digest.update(repr((name, x.shape, x.dtype.str)).encode() + x.tobytes())
        self._digest = digest.hexdigest()

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenArrays) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __reduce__(self):
        return FrozenArrays, (self._arrays,)  # numpy forgets on the way that an array cannot be written to

    def __repr__(self) -> str:
        return f"FrozenArrays({sum(x.size for x in self._arrays.values())} numbers, {self._digest[:12]})"
