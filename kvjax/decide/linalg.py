"""Linear algebra of many small matrices."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jaxtyping import Array


def of_each(f: Callable[..., Any], *arrays: Array) -> Any:
    """What a function of matrices or vectors gives for each sequence and head.

    On CPUs one follows another: batches that one program gives to LAPACK at a time wait for ever for the threads that
    they occupy themselves (jaxlib 0.10, 2 cores).

    Args:
      f: of as many arrays.
      arrays: "B K ..." each.
    """
    one_by_one = lambda *x: lax.map(lambda row: lax.map(lambda each: f(*each), row), x)
    return lax.platform_dependent(*arrays, cpu=one_by_one, default=jax.vmap(jax.vmap(f)))
