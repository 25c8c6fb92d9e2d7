"""The contract stays as small as it is said to be."""

import pytest

from tests import contract

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
    assert entered["functions that generate enters"] <= 120
    assert entered["functions that it enters again"] <= 65
