"""Checks of options. Each function returns the value in Python's own type, or says what it must be."""

import numpy as np

from kvjax.pallas_kernels.kinds import MOST

_REAL = int | float | np.integer | np.floating
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def whole(name: str, n: object, least: int = 1, most: int = MOST - 1, why: str = "") -> int:
    """A whole number from `least` to `most`."""
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or not least <= n <= most:
        raise ValueError(f"{name}={n!r} must be a whole number from {least} to {most:,}{why and '; '}{why}")
    return int(n)


def positive(name: str, x: object) -> float:
    """A number above 0 that neither vanishes nor overflows in 32 bits."""
    if isinstance(x, bool) or not isinstance(x, _REAL) or not _SMALLEST <= x <= _LARGEST:
        raise ValueError(f"{name}={x!r} must be a positive number that 32 bits hold")
    return float(x)


def probability(name: str, x: object) -> float:
    """A number between 0 and 1, neither of them included."""
    if isinstance(x, bool) or not isinstance(x, _REAL) or not 0 < x < 1:
        raise ValueError(f"{name}={x!r} must be a number in (0, 1)")
    return float(x)


def flag(name: str, x: object) -> bool:
    """True or False."""
    if not isinstance(x, bool | np.bool_):
        raise ValueError(f"{name}={x!r} must be True or False")
    return bool(x)


def one_of(name: str, x: object, *choices: str) -> None:
    """Refuses what is none of the names in `choices`."""
    if not isinstance(x, str) or x not in choices:
        raise ValueError(f"{name}={x!r} is not one of {choices}")
