"""Checks of options. Each function returns the value in Python's own type, or says what it must be."""

from typing import Any

import numpy as np

from kvjax.pallas_kernels.kinds import MOST

_REAL = int | float | np.integer | np.floating
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def whole(name: str, n: Any, least: int = 1, most: int = MOST - 1, why: str = "") -> int:
    """A whole number from `least` to `most`."""
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or not least <= n <= most:
        raise ValueError(f"{name}={n!r} must be a whole number from {least} to {most:,}{why and '; '}{why}")
    return int(n)


def positive(name: str, x: Any) -> float:
    """A number above 0 that neither vanishes nor overflows in 32 bits."""
    if isinstance(x, bool) or not isinstance(x, _REAL) or not _SMALLEST <= x <= _LARGEST:
        raise ValueError(f"{name}={x!r} must be a positive number that 32 bits hold")
    return float(x)


def probability(name: str, x: Any) -> float:
    """A number between 0 and 1, neither of them included."""
    if isinstance(x, bool) or not isinstance(x, _REAL) or not 0 < x < 1:
        raise ValueError(f"{name}={x!r} must be a number in (0, 1)")
    return float(x)


def flag(name: str, x: Any) -> bool:
    """True or False."""
    if not isinstance(x, bool | np.bool_):
        raise ValueError(f"{name}={x!r} must be True or False")
    return bool(x)


def one_of(name: str, x: Any, *choices: str) -> None:
    """Refuses what is none of the names in `choices`."""
    if not isinstance(x, str) or x not in choices:
        raise ValueError(f"{name}={x!r} is not one of {choices}")


def unlike(name: str, x: Any, like: Any) -> str:
    """Says what of JSON that was read is not as it was written; "" where all of it is.

    Args:
      name: what `x` is called.
      x: what was read.
      like: what it must be: a type; a range of whole numbers; a set of several that it may be one of; a list of one,
        for any number of these; a tuple, for a list of as many; a dict, for an object of these names.
    """
    inner: list[tuple[str, Any, Any]] = []
    if isinstance(like, set):
        return min(unlike(name, x, one) for one in like)
    if isinstance(like, list) and isinstance(x, list):
        inner = [(f"{name}[{i}]", of, like[0]) for i, of in enumerate(x)]
    elif isinstance(like, tuple) and isinstance(x, list) and len(x) == len(like):
        inner = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(x, like, strict=True))]
    elif isinstance(like, dict) and isinstance(x, dict) and x.keys() == like.keys():
        inner = [(f"{name}.{key}", x[key], of) for key, of in like.items()]
    elif not (type(x) is int and x in like if isinstance(like, range) else isinstance(like, type) and type(x) is like):
        return f"{name}={x!r:.60}"
    return next(filter(None, (unlike(*each) for each in inner)), "")
