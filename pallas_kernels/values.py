"""Rules for what users give as options: each returns the value in plain Python's types, or says why it has no meaning.

A rule is a function of a value that raises ValueError with the reason. `checked` applies one to an argument of a
function, `settle` some to the fields of a frozen dataclass. So what is equal has one type and one hash, and static
arguments of `jax.jit` and keys of caches never take one setting for another: a whole number is an `int`, a real one a
`float` (0.0 where -0.0 was given), a switch a `bool`, whichever of Python's or numpy's types they were written in.
"""

import contextvars
import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST_TOKENS = 2**30 - 1
"""More tokens than any plan holds; larger counts mean no more. The sum of two is a number of 32 bits."""

Rule = Callable[[Any], Any]

_COMPLETE = contextvars.ContextVar("complete", default=False)


class Value:
    """Frozen dataclasses that print the fields which differ from their defaults, and evaluate back from that."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):  # the decorator of dataclasses leaves a class its own
            cls.__repr__ = _shown  # type: ignore[method-assign]


def _shown(value: Any) -> str:
    if not dataclasses.is_dataclass(value):
        return object.__repr__(value)
    written = []
    for field in dataclasses.fields(value):
        make = field.default_factory
        default = field.default if isinstance(make, type(dataclasses.MISSING)) else make()
        found = repr(getattr(value, field.name))
        if _COMPLETE.get() or default is dataclasses.MISSING or found != repr(default):
            written.append(f"{field.name}={found}")
    return f"{type(value).__qualname__}({', '.join(written)})"


def complete_repr(value: Any) -> str:
    """The repr of anything, in which every `Value` has all of its fields: the same whatever defaults become later."""
    token = _COMPLETE.set(True)
    try:
        return repr(value)
    finally:
        _COMPLETE.reset(token)


def checked(rule: Rule, name: str, value: Any, owner: str = "") -> Any:
    """What a rule makes of a value.

    Args:
      rule: the rule.
      name: the argument or field, as its user writes it.
      value: what the user gave.
      owner: the class of a field.

    Raises:
      ValueError: naming the option, the value and the reason.
    """
    try:
        return rule(value)
    except ValueError as error:
        written = f"{owner}({name}={value!r})" if owner else f"{name}={value!r}"
        raise ValueError(f"{written}: {error}") from None


def settle(instance: Any, **rules: Rule) -> None:
    """Replaces fields of a frozen dataclass by what their rules make of them; to be called in `__post_init__`.

    Raises:
      ValueError: see `checked`.
    """
    for name, rule in rules.items():
        object.__setattr__(instance, name, checked(rule, name, getattr(instance, name), type(instance).__name__))


def one_of(name: str, value: object, *choices: object) -> None:
    """Refuses what is none of `choices`.

    Args:
      name: the option, as its user writes it.
      value: what the user gave.
      *choices: the values that exist.

    Raises:
      ValueError: naming the option, the value and the choices.
    """
    same = lambda choice: isinstance(value, type(choice)) and not isinstance(value, bool) and value == choice
    if not any(map(same, choices)):
        raise ValueError(f"{name}={value!r} is not one of {choices}")


@functools.cache
def whole(low: int | None = None, high: int | None = None, why: str = "") -> Rule:
    """Whole numbers from `low` to `high`; `why` is said of others."""
    least = "" if low is None else f" of at least {low}"
    most = "" if high is None else f"{' and' if least else ' of'} at most {high:,}"

    def rule(value: Any) -> int:
        n = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None
        if n is None or (low is not None and n < low) or (high is not None and n > high):
            raise ValueError(why or f"must be a whole number{least}{most}")
        return n

    return rule


@functools.cache
def tokens(low: int = 0, why: str = "") -> Rule:
    """Numbers of tokens, rows or steps; those beyond `MOST_TOKENS` are cut to it, which no plan can tell apart."""
    rule = whole(low, why=why)
    return lambda value: min(rule(value), MOST_TOKENS)


@functools.cache
def number(interval: str = "(-inf, inf)", why: str = "") -> Rule:
    """Real numbers in an interval such as "(0, 1]", in 32 bits as well; `why` is said of others."""
    low, high = (float(end) for end in interval[1:-1].split(","))

    def same(x: float, end: float) -> bool:
        """Whether a number is an end of the interval in 32 bits, where what is tiny is 0 and what is huge infinite."""
        tiny, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
        return x == end or (end == 0 and abs(x) < tiny) or (math.isinf(end) and abs(x) > most)

    def rule(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(why or f"must be a number in {interval}")
        try:
            x = float(value) + 0.0  # -0.0 becomes 0.0
        except OverflowError:
            x = math.nan
        if not low <= x <= high or (interval[0] == "(" and same(x, low)) or (interval[-1] == ")" and same(x, high)):
            raise ValueError(why or f"must be a number in {interval}")
        return x

    return rule


def float_dtype(dtype: Any) -> np.dtype:
    """Dtypes of floats."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = jnp.dtype(bool)
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError("must be a dtype of floats, such as jax.numpy.bfloat16")
    return found


def flag(value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError("must be True or False")
    return bool(value)


def a(*types: type) -> Rule:
    """Instances of one of the types."""

    def rule(value: Any) -> Any:
        if not isinstance(value, types):
            raise ValueError(f"must be of type {' or '.join(t.__name__ for t in types)}, not {type(value).__name__}")
        return value

    return rule


def each(rule: Rule, count: int | None = None, *, least: int = 0) -> Rule:
    """Sequences and arrays whose elements follow a rule, as tuples, of `count` elements or at `least` so many."""

    def every(value: Any) -> tuple[Any, ...]:
        listed = value.tolist() if isinstance(value, np.ndarray | jax.Array) else value  # a number if it has no axes
        if isinstance(listed, str) or not hasattr(listed, "__iter__"):
            raise ValueError("must be a sequence")
        found = tuple(map(rule, listed))
        if len(found) < least or (count is not None and len(found) != count):
            raise ValueError(f"must have {f'at least {least}' if count is None else count} elements, not {len(found)}")
        return found

    return every


def check_array(name: str, x: Any, *axes: str, kind: type = np.floating, shape: tuple[int, ...] | None = None) -> None:
    """Refuses what is no array of a kind of numbers, or has other axes.

    Args:
      name: the argument, as its user writes it.
      x: what the user gave; arrays of numpy and JAX, traced ones too.
      *axes: what the axes are, for the message.
      kind: the kind of numbers.
      shape: its shape, where that is known.

    Raises:
      ValueError: what it is, and what it must be.
    """
    what = f"{ {np.floating: 'floats', np.integer: 'integers'}.get(kind, 'booleans') } with axes ({', '.join(axes)})"
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{name} must be an array of {what}, not {type(x).__name__}; use jax.numpy.asarray")
    if x.ndim != len(axes) or not jnp.issubdtype(x.dtype, kind) or 0 in x.shape:
        raise ValueError(f"{name} must be an array of {what}, none of them 0; got {x.dtype} of shape {x.shape}")
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name} has the shape {x.shape}, but {shape} fits the others, with axes ({', '.join(axes)})")


def check_finite(name: str, x: Any) -> None:
    """Refuses an array of floats, outside of traces, that has NaNs or infinities.

    Raises:
      ValueError: how many numbers are none.
    """
    if odd := int((~np.isfinite(np.asarray(x, np.float64))).sum()):
        raise ValueError(f"{name} has {odd} of {np.size(x)} numbers that are not finite; find them anew")


def optional(rule: Rule) -> Rule:
    """None, and what the rule allows."""
    return lambda value: None if value is None else rule(value)
