"""Tests of the core."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _as_users_run_it():
    """The core does not yet spell out every conversion, as the strict JAX of other tests wants it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
