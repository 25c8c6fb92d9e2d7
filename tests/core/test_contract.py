"""The contract stays as small as it is said to be."""

import jax
import pytest

from tests import contract


@pytest.fixture(autouse=True)
def _as_users_run_it():
    """The core does not yet spell out every conversion, as conftest's strict JAX wants it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


LIMITS = {
    "members of Policy": 14,
    "members of Score": 4,
    "fields of Evict": 12,
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_contract_stays_small(name):
    assert contract.sizes()[name] <= LIMITS[name]


def test_generating_enters_few_functions():
    entered = contract.calls()
    assert entered["functions that generate enters"] <= 126
    assert entered["functions that it enters again"] <= 65
