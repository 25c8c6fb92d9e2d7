"""Rules for what users give as options: each returns the value in plain Python's types, or says why it has no meaning.

A rule is a function of a value that raises ValueError with the reason. `checked` applies one to an argument of a
function, `settle` some to the fields of a frozen dataclass. So what is equal has one type and one hash, and static
arguments of `jax.jit` and keys of caches never take one setting for another: a whole number is an `int`, a real one a
`float` (0.0 where -0.0 was given), a switch a `bool`, whichever of Python's or numpy's types they were written in.
"""

import contextvars
import dataclasses
import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

MOST_TOKENS = 2**30 - 1
"""More tokens than any plan holds; larger counts mean no more. The sum of two is a number of 32 bits."""

Rule = Callable[[Any], Any]
_F = TypeVar("_F", bound=Callable[..., Any])

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
            raise ValueError(f"must be a number in {interval}{why and ': '}{why}")
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
        found = jnp.dtype(bool if dtype is None else dtype)  # numpy takes None for float64
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


def as_given(name: str, x: Any, advice: str = "") -> np.ndarray | jax.Array:
    """What a user gave as an array: of JAX as it is, traced or not, and anything else as one of numpy (`as_numpy`)."""
    return x if isinstance(x, jax.Array) and not is_key(x) else as_numpy(name, x, advice)


def as_numbers(name: str, x: Any) -> np.ndarray | jax.Array:
    """What a user gave as an array of real numbers (`as_given`); a ValueError for anything else, booleans too."""
    found = as_given(name, x)
    if not jnp.issubdtype(found.dtype, jnp.floating) and not jnp.issubdtype(found.dtype, jnp.integer):
        raise ValueError(f"{name} must be numbers; got {found.dtype} of shape {found.shape}")
    return found


def check_arrays(name: str, tree: Any) -> None:
    """Refuses a tree, such as parameters, that holds something else than arrays and numbers, or is one of them.

    Raises:
      ValueError: what the first of it is, and where.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        of_numbers = is_array(x) and (isinstance(x, jax.Array) or x.dtype.kind not in "OSUMm")
        if not path and (of_numbers or isinstance(x, numbers.Number)):
            raise ValueError(f"{name} are one array or number, not the {name} of a model that models.load(...) returns")
        if not of_numbers and not isinstance(x, numbers.Number):
            raise ValueError(_why_no_array(f"{name}{jax.tree_util.keystr(path)}", x))


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


def as_annotated(function: _F) -> _F:
    """A function that refuses, by their annotations, what are no arrays of a kind, and no instances of a dataclass.

    Arrays are those of one annotation of jaxtyping, or None beside it: their numbers must be of its kind, they must
    have as many axes, and axes of one name must have one size in all arguments. Other annotations are not looked at.

    Raises:
      ValueError: what an argument is, and what it must be.
    """
    signature, arrays, instances = inspect.signature(function), {}, {}
    for name, parameter in signature.parameters.items():
        kinds, may_lack = (parameter.annotation,), False
        if isinstance(parameter.annotation, types.UnionType) or typing.get_origin(parameter.annotation) is typing.Union:
            kinds = tuple(k for k in typing.get_args(parameter.annotation) if k is not type(None))
            may_lack = len(kinds) < len(typing.get_args(parameter.annotation))
        if len(kinds) == 1 and hasattr(kinds[0], "dim_str"):
            arrays[name] = kinds[0].dtype.__name__, kinds[0].dim_str.split(), may_lack
        elif len(kinds) == 1 and dataclasses.is_dataclass(kinds[0]):
            instances[name] = kinds[0]

    @functools.wraps(function)
    def on_arrays(*args: Any, **kwargs: Any) -> Any:
        sizes: dict[str, tuple[str, int]] = {}
        for name, x in signature.bind(*args, **kwargs).arguments.items():
            if name in instances and not isinstance(x, instances[name]):
                raise ValueError(f"{name} is a {type(x).__name__}, not a {instances[name].__name__}")
            if name in arrays:
                kind, axes, may_lack = arrays[name]
                if x is not None or not may_lack:
                    _check_axes(name, x, kind, axes, sizes)
        return function(*args, **kwargs)

    return typing.cast(Any, on_arrays)


_KINDS = {"Float": np.floating, "Int": np.integer, "Bool": np.bool_}


def _check_axes(name: str, x: Any, kind: str, axes: list[str], sizes: dict[str, tuple[str, int]]) -> None:
    """Refuses an array that is none of a kind, or whose axes are not those of the others (`as_annotated`)."""
    several = next((i for i, axis in enumerate(axes) if axis[0] in "*."), None)
    if several is not None and is_array(x):
        axes = [*axes[:several], *["..."] * (x.ndim + 1 - len(axes)), *axes[several + 1 :]]
    check_array(name, x, *axes, kind=_KINDS[kind])
    for axis, size in zip(axes, x.shape, strict=True):
        other, there = sizes.setdefault(axis, (name, size)) if axis.isidentifier() else (name, size)
        if size != there:
            raise ValueError(f"{name} has the shape {x.shape}: {size} on the axis {axis}, where {other} has {there}")


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
