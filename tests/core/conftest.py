"""JAX as users run it: the core does not yet spell out every conversion, as the strict JAX of other tests wants it."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _as_users_run_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
