"""Linear algebra of many small matrices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


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


def unit(x: Float[Array, "*n H"], least: float = 1e-12) -> Float[Array, "*n H"]:
    """Vectors of length 1."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), least)


def least_squares(a: Float[Array, "R C"], b: Float[Array, "R *D"]) -> Float[Array, "C *D"]:
    """The x for which `a @ x` is near `b`, small where rows do not determine it.

    Squares of x count by a 10^-5th of the largest column's. Without that, rounding would decide where rows are few or
    alike, and a row of a batch would not get what it gets alone.
    """
    damping = jnp.sqrt(1e-5 * jnp.maximum(jnp.square(a).sum(0).max(), 1e-30))
    q, r = jnp.linalg.qr(jnp.concatenate([a, damping * jnp.eye(a.shape[1], dtype=a.dtype)]))
    return jax.scipy.linalg.solve_triangular(r, q[: len(a)].T @ b)
