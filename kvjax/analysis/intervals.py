"""Means over prompts, and how far they may be off."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy  # its parts are imported when they are first used

from kvjax.contract.checks import probability


class Interval(NamedTuple):
    """Means with their confidence intervals, of any shape."""

    mean: Any
    low: Any
    high: Any


def interval(values: np.ndarray | Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean and Student-t interval over the last axis, in whatever order; infinitely wide for a single value.

    Args:
      values: "... B", one value a prompt.
      confidence: how likely an interval made so holds the true mean.

    Raises:
      ValueError: a confidence that is no probability inside (0, 1), values that are no numbers, no values.
    """
    confidence = probability("confidence", confidence)
    values = np.asarray(values)
    if values.dtype.kind not in "fiub":
        raise ValueError(f"values must be numbers; got {values.dtype}")
    if not values.ndim or not values.size:
        raise ValueError(f"values have the shape {values.shape}; give one number a prompt, on the last axis")
    values = np.sort(values, -1)
    n, mean = values.shape[-1], values.mean(-1)
    if n < 2:
        return Interval(mean, np.full_like(mean, -np.inf), np.full_like(mean, np.inf))
    half = float(scipy.special.stdtrit(n - 1, 0.5 + confidence / 2)) * values.std(-1, ddof=1) / np.sqrt(n)
    return Interval(mean, mean - half, mean + half)
