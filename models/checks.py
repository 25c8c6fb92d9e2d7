"""What a number of a config must be: rules of `kvjax.pallas_kernels.values` for values with names."""

from typing import Any, Final

from kvjax.pallas_kernels import values

MOST: Final = 2**31 - 1  # what an int32 can count


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """`value` as an int.

    Raises:
      ValueError: a fraction, a bool, no number, less than `least` or more than an int32 can count.
    """
    return values.checked(values.whole(least, MOST), name, value)


def positive(name: str, value: Any) -> float:
    """`value` as a float.

    Raises:
      ValueError: zero, negative, infinite, NaN, no number, or outside of what a float32 can hold.
    """
    return values.checked(values.number("(0, inf)"), name, value)


def flag(name: str, value: Any) -> bool:
    """`value`, which must be a bool.

    Raises:
      ValueError: anything else.
    """
    return values.checked(values.flag, name, value)
