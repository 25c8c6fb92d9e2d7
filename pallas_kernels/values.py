"""Rules for what users give as options: each returns the value in plain Python's types, or says why it has no meaning.

A rule is a function of a value that raises ValueError with the reason. `checked` applies one to an argument of a
function, `settle` some to the fields of a frozen dataclass. So what is equal has one type and one hash, and static
arguments of `jax.jit` and keys of caches never take one setting for another: a whole number is an `int`, a real one a
`float` (0.0 where -0.0 was given), a switch a `bool`, whichever of Python's or numpy's types they were written in.
"""

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
            raise ValueError(f"must be a number in {interval}{why and ': '}{why}")
        try:
            x = float(value) + 0.0  # -0.0 becomes 0.0
        except OverflowError:
            x = math.nan
        if not low <= x <= high or (interval[0] == "(" and same(x, low)) or (interval[-1] == ")" and same(x, high)):
            raise ValueError(why or f"must be a number in {interval}")
        return x

    return rule


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
        if hasattr(value, "dtype"):
            value = as_numpy("it", value, tensors=False).tolist()  # a number if it has no axes
        if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
            raise ValueError("must be a sequence")
        found = tuple(map(rule, value))
        if len(found) < least or (count is not None and len(found) != count):
            raise ValueError(f"must have {f'at least {least}' if count is None else count} elements, not {len(found)}")
        return found

    return every


def is_array(x: Any) -> bool:
    """Whether something is an array of numpy or JAX, or traced; tensors of other libraries are none."""
    return isinstance(x, jax.Array) or isinstance(getattr(x, "dtype", None), np.dtype)


def _why_no_array(name: str, x: Any, error: Exception | None = None) -> str:
    """What is wrong with what cannot be read as an array of numbers, and what to do."""
    if is_key(x):
        return f"{name} is a PRNG key, not numbers; keys are for key="
    if isinstance(x, jax.core.Tracer):
        return f"{name} is traced, but must be known before anything is compiled; give numbers of Python or numpy"
    if hasattr(x, "dtype") and not is_array(x):
        kind = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}"
        return (
            f"{name} is a {kind}, not an array of numpy or JAX; give x.numpy() in its place, or "
            "jax.numpy.asarray(x.numpy()); where x has a gradient, lies on a device or is of bfloat16, "
            "x.detach().cpu().float().numpy()"
        )
    if is_array(x):
        return f"{name} holds {x.dtype}, not numbers"
    reason = "" if error is None else f": {str(error).splitlines()[0]}"
    return f"{name} is a {type(x).__name__}, which cannot be read as an array of numbers{reason}"


def is_key(x: Any) -> bool:
    """Whether something is a typed PRNG key, or an array of them."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_numpy(name: str, x: Any, advice: str = "", *, tensors: bool = True) -> np.ndarray:
    """What a user gave in place of known numbers, as an array of numpy.

    Args:
      name: the argument, as its user writes it.
      x: what the user gave.
      advice: what to do about rows of different lengths.
      tensors: whether tensors of other libraries are taken, where numpy can read them.

    Raises:
      ValueError: rows of different lengths, PRNG keys, traced values, tensors.
    """
    if not tensors and not is_array(x):
        raise ValueError(_why_no_array(name, x))
    try:
        return np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name} are no array: {error}{advice}") from None
    except (TypeError, RuntimeError) as error:  # of keys, of traced values, and of tensors that numpy cannot read
        raise ValueError(_why_no_array(name, x, error)) from None


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
    if not is_array(x):
        why = f"{name} must be an array of {what}, not {type(x).__name__}; use jax.numpy.asarray"
        raise ValueError(_why_no_array(name, x) if hasattr(x, "dtype") else why)
    if x.ndim != len(axes) or not jnp.issubdtype(x.dtype, kind) or 0 in x.shape:
        raise ValueError(f"{name} must be an array of {what}, none of them 0; got {x.dtype} of shape {x.shape}")
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name} has the shape {x.shape}, but {shape} fits the others, with axes ({', '.join(axes)})")


def optional(rule: Rule) -> Rule:
    """None, and what the rule allows."""
    return lambda value: None if value is None else rule(value)
